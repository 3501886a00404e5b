"""Build a Megatron GPTModel from the shape of a Hugging Face model.

The last stage of a policy returns log-probs or a loss, not logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch

from megarl.config.hf_config import ModelShape
from megarl.kernels.divergence import Teacher
from megarl.kernels.fused_linear_policy_loss import TokenLoss, fused_linear_policy_loss
from megarl.kernels.linear_log_probs import Method, linear_log_probs
from megarl.megatron import gemma
from megarl.megatron.attention import StackedQKVSelfAttention
from megarl.megatron.context_parallel import gather_rows
from megarl.megatron.cpu_shim import cpu_megatron
from megarl.megatron.expert_router import ExpertRouter
from megarl.megatron.latent_attention import LatentAttention, ReplicatedLinear
from megarl.megatron.modules import PackedAttention, RMSNorm, mlp_submodules, with_bias
from megarl.megatron.rope import inverse_frequencies
from megarl.megatron.teacher import HeadInputs
from megarl.megatron.transformer_engine import uses_transformer_engine

with cpu_megatron():
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import (
        LayerNormImpl,
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset


Model = TypeVar("Model", bound=GPTModel)


@dataclass(frozen=True)
class ResponseTokens:
    """Request to a forward pass: the tokens whose log-probs `PolicyModel` returns; passed as GPTModel's
    `labels`."""

    predict_positions: torch.Tensor
    """[n] int64: positions, among this rank's tokens, that predict its n response tokens."""
    targets: torch.Tensor
    """[n] int64 token ids of these response tokens."""
    temperature: float
    with_entropy: bool
    method: Method = "chunked"
    """Method of `linear_log_probs`.

    "chunked" returns the same bits as a loss sees. The ratio of a policy to itself is then exactly 1."""
    loss: TokenLoss | None = None
    """Loss that is computed, with its gradients, in the forward pass. It is a sum over tokens."""
    teacher: Callable[[HeadInputs, int], Teacher] | None = None
    """With a loss: what the policy is compared with, given the inputs of the output layer and the
    vocabulary."""
    outputs: Callable[[HeadInputs], torch.Tensor] | None = None
    """Function whose [n, ...] values are returned in place of log-probs."""
    rows: torch.Tensor | None = None
    """[n] int64: indices of these tokens among the N tokens of all context-parallel ranks, or None."""
    count: int = 0
    """N, the number of response tokens on all context-parallel ranks; only used with `rows`."""


class PolicyModel(GPTModel):
    """GPTModel whose last stage returns log-probs of response tokens, or a loss of them.

    Without a loss the result is (log_probs [N] fp32, entropy [N] fp32 or None) of all context-parallel ranks.
    With a loss the result is (loss, metrics of each chunk of tokens), and is this rank's part.

    Only the hidden states that predict a response token reach the output layer, so prompts need no logits.
    Responses need logits for one chunk at a time. `output_layer` only holds the weight; its forward is never
    called."""

    has_value_head: ClassVar[bool] = False
    real_vocab_size: int
    """Number of tokens, without padding; set by `build_model`."""
    accumulates_into_main_grad = False
    """True if the gradient of the output layer goes straight into DDP's fp32 buffer.

    It is off where DDP reduces gradients during backward and with Megatron-FSDP, because both wait for a
    gradient from autograd."""

    def _postprocess(self, hidden_states, input_ids, position_ids, labels: ResponseTokens, *args, **kwargs):
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # The positions are selected from the whole sequence. The gradient of `hidden` below is already
            # summed over the ranks, so each rank takes its slice instead of summing again.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        hidden = hidden_states[labels.predict_positions].squeeze(1)  # [N, H]
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        group = self.pg_collection.tp
        inputs = HeadInputs(hidden, weight, labels.targets, group, labels.temperature)
        if labels.outputs is not None:
            return (
                gather_rows(labels.outputs(inputs), labels.rows, labels.count, self.pg_collection.cp),
                None,
            )
        accumulates = self.accumulates_into_main_grad and torch.is_grad_enabled()
        options = dict(
            vocab_size=self.real_vocab_size,
            group=group,
            temperature=labels.temperature,
            with_entropy=labels.with_entropy,
            main_grad=getattr(weight, "main_grad", None) if accumulates else None,
        )
        if labels.loss is None:
            outputs = linear_log_probs(hidden, weight, labels.targets, method=labels.method, **options)
            return tuple(
                x if x is None else gather_rows(x, labels.rows, labels.count, self.pg_collection.cp)
                for x in outputs
            )
        teacher = None if labels.teacher is None else labels.teacher(inputs, self.real_vocab_size)
        fused = fused_linear_policy_loss(
            hidden, weight, labels.targets, labels.loss, teacher=teacher, **options
        )
        return fused.loss, fused.metrics


def _layer_specs(config: TransformerConfig, shape: ModelShape, qkv_layout: str) -> list[ModuleSpec]:
    """Return the specs of all layers; layers of one kind share one spec object. Raises ValueError for a
    sliding window with context parallelism in Transformer Engine."""
    if uses_transformer_engine() and config.context_parallel_size > 1 and config.window_size is not None:
        raise ValueError(
            f"--context-parallel-size ({config.context_parallel_size}): Transformer Engine sends "
            "keys of packed sequences round the "
            f"ranks, which layers with a sliding window ({config.window_size[0] + 1} tokens) cannot "
            "use. Set it to 1, and try "
            "--tensor-model-parallel-size."
        )
    kinds = {
        is_moe: _layer_spec(config, shape, qkv_layout, is_moe)
        for is_moe in {shape.is_moe_layer(i) for i in range(shape.num_layers)}
    }
    return [kinds[shape.is_moe_layer(layer)] for layer in range(shape.num_layers)]


def _layer_spec(config: TransformerConfig, shape: ModelShape, qkv_layout: str, is_moe: bool) -> ModuleSpec:
    options = dict(
        num_experts=config.num_moe_experts if is_moe else None,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=shape.is_mla,
    )
    if uses_transformer_engine():
        spec = get_gpt_layer_with_transformer_engine_spec(
            moe_grouped_gemm=config.moe_grouped_gemm and is_moe, **options
        )
    else:
        spec = _local_layer_spec(options)
    attention, mlp = spec.submodules.self_attention.submodules, mlp_submodules(spec)
    if shape.o_bias:
        attention.linear_proj = with_bias(attention.linear_proj)
    if shape.mlp_bias:
        mlp.linear_fc1, mlp.linear_fc2 = with_bias(mlp.linear_fc1), with_bias(mlp.linear_fc2)
    if shape.output_norms:
        gemma.adapt_spec(spec)
    if qkv_layout == "stacked" and config.num_query_groups >= config.tensor_model_parallel_size:
        spec.submodules.self_attention.module = StackedQKVSelfAttention
    if shape.is_mla:
        spec.submodules.self_attention.module = LatentAttention
    if is_moe:
        mlp.router = functools.partial(
            ExpertRouter, corrects_scores=shape.corrects_scores, group_best=shape.moe_router_group_best
        )
    return spec


def _local_layer_spec(options: dict[str, object]) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", **options)
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention.core_attention = PackedAttention
    if options["multi_latent_attention"]:
        attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    elif options["qk_layernorm"]:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def build_model(
    kind: type[Model],
    config: TransformerConfig,
    shape: ModelShape,
    groups: ProcessGroupCollection,
    qkv_layout: str,
) -> list[Model]:
    """Return this rank's part of the model, one module per virtual pipeline stage, with uninitialised
    weights.

    Collective over the mesh (tied embeddings)."""
    assert shape.value_head == kind.has_value_head, f"a {kind.__name__} needs another shape"
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    return [
        _build_chunk(kind, config, shape, groups, qkv_layout, chunk, num_chunks)
        for chunk in range(num_chunks)
    ]


def _build_chunk(
    kind: type[Model],
    config: TransformerConfig,
    shape: ModelShape,
    groups: ProcessGroupCollection,
    qkv_layout: str,
    chunk: int,
    num_chunks: int,
) -> Model:
    stage, last_stage = groups.pp.rank(), groups.pp.size() - 1
    vp_stage = chunk if num_chunks > 1 else None
    with cpu_megatron():
        first = get_transformer_layer_offset(config, vp_stage, stage)
        count = get_num_layers_to_build(config, vp_stage, stage)
        layers = _layer_specs(config, shape, qkv_layout)[first : first + count]
        spec = TransformerBlockSubmodules(
            layers, layer_norm=LayerNormImpl if uses_transformer_engine() else RMSNorm
        )
        model = kind(
            config,
            spec,
            vocab_size=shape.padded_vocab_size(),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=(chunk, stage) == (0, 0),
            post_process=(chunk, stage) == (num_chunks - 1, last_stage),
            vp_stage=vp_stage,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
            parallel_output=True,
            pg_collection=groups,
        )
        model.real_vocab_size = shape.vocab_size
        if shape.is_gqa:
            model.rotary_pos_emb.inv_freq = inverse_frequencies(
                shape.rope_theta, shape.head_dim, shape.rope_scaling
            )
        if shape.output_norms:
            gemma.adapt_model(model, shape)
        if not config.use_cpu_initialization:
            model.cuda()
    _check_tensor_parallel_marks(model, config)
    return model


def _check_tensor_parallel_marks(model: GPTModel, config: TransformerConfig) -> None:
    """Assert that every shard is marked as tensor-parallel.

    The gradient norm would count an unmarked shard only on the first rank, and clipping would be silently
    wrong."""
    sharded = (
        "linear_qkv",
        "linear_proj.weight",
        "linear_fc1",
        "linear_fc2.weight",
        "word_embeddings",
        "output_layer",
        "linear_q_proj",
        "linear_q_up_proj",
        "linear_kv_up_proj",
    )
    for name, parameter in model.named_parameters():
        ranks = (
            config.expert_tensor_parallel_size if ".experts." in name else config.tensor_model_parallel_size
        )
        if ranks > 1 and any(s in name for s in sharded) and "layer_norm" not in name:
            assert getattr(parameter, "tensor_model_parallel", False), (
                f"{name} is split but not marked tensor_model_parallel"
            )
