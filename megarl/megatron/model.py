"""Build a Megatron GPTModel from the shape of a Hugging Face model.

The last stage of the model returns log-probs, a loss or values, not logits."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F

from megarl.config.hf_config import ModelShape
from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.kernels.fused_linear_policy_loss import TokenLoss, fused_linear_policy_loss
from megarl.kernels.linear_log_probs import Method, linear_log_probs
from megarl.megatron import gemma
from megarl.megatron.attention import SharedKeySelfAttention, StackedQKVSelfAttention
from megarl.megatron.context_parallel import gather_rows
from megarl.megatron.cpu_shim import cpu_megatron
from megarl.megatron.expert_router import ExpertRouter
from megarl.megatron.latent_attention import LatentAttention, ReplicatedLinear
from megarl.megatron.libraries import fuses_gradient_accumulation
from megarl.megatron.modules import PackedAttention, RMSNorm, with_bias
from megarl.megatron.rope import attention_factor, inverse_frequencies
from megarl.megatron.transformer_engine import transformer_engine_problem, uses_transformer_engine

with cpu_megatron():
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import (
        LayerNormImpl,
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset


Model = TypeVar("Model", bound=GPTModel)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {"silu": F.silu, "gelu_tanh": gelu_tanh}
"""Maps ModelShape.activation to the function for the gate of the MLP."""


@dataclass(frozen=True)
class ResponseTokens:
    """The log-probs that a forward pass must return; passed as GPTModel's `labels`."""

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

    def __init__(self, *args, real_vocab_size: int, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.real_vocab_size = real_vocab_size
        # The gradient of the output layer goes straight into DDP's fp32 buffer. This is off where DDP reduces
        # gradients during backward and with Megatron-FSDP, because both wait for a gradient from autograd.
        self.accumulates_into_main_grad = False

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
        main_grad = (
            getattr(weight, "main_grad", None)
            if torch.is_grad_enabled() and self.accumulates_into_main_grad
            else None
        )
        options = dict(
            vocab_size=self.real_vocab_size,
            group=self.pg_collection.tp,
            temperature=labels.temperature,
            with_entropy=labels.with_entropy,
            main_grad=main_grad,
        )
        if labels.loss is None:
            outputs = linear_log_probs(hidden, weight, labels.targets, method=labels.method, **options)
            return tuple(
                x if x is None else gather_rows(x, labels.rows, labels.count, self.pg_collection.cp)
                for x in outputs
            )
        fused = fused_linear_policy_loss(hidden, weight, labels.targets, labels.loss, **options)
        return fused.loss, fused.metrics


class ValueHead(torch.nn.Module):
    """A linear layer that returns one number per token: hidden @ weight, in fp32, without bias.

    The weight [1, H] is whole on every tensor-parallel rank. Under sequence parallelism each rank has a part
    of the tokens, so its gradient is a part of the weight's gradient. The weight is marked sequence_parallel,
    and finalize_model_grads sums the parts. Without sequence parallelism every rank has all tokens and the
    whole gradient. The gradient norm counts the weight once, because the weight is not marked
    tensor_model_parallel. DDP sums the parts of context-parallel ranks."""

    def __init__(self, config: TransformerConfig, group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = self.sequence_parallel = config.sequence_parallel
        self.group = group

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the values [N] fp32 at `positions`, [N] int64 among all tokens.

        `hidden` is [T, 1, H], a part of the tokens under sequence parallelism."""
        if not self.sequence_parallel:
            return self._values(hidden[positions])
        # Every rank computes the same loss from all values, so each takes its part of the gradient instead of
        # summing.
        values = gather_from_sequence_parallel_region(
            self._values(hidden), tensor_parallel_output_grad=False, group=self.group
        )
        return values[positions]

    def _values(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden.float() @ self.weight.float().t()).flatten()


@dataclass(frozen=True)
class ValuePositions:
    """The positions at which a forward pass must return values; passed as GPTModel's `labels`."""

    positions: torch.Tensor
    """[n] int64: positions among the tokens that this rank has."""
    rows: torch.Tensor | None
    """[n] int64: indices of these values among all N wanted values. None means all."""
    count: int
    """N, the number of wanted values."""


class ValueHeadModel(GPTModel):
    """GPTModel whose last stage returns values [N] fp32.

    The values are at the positions of all context-parallel ranks."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:
            del self.output_layer
            self.value_head = ValueHead(self.config, self.pg_collection.tp)

    def _postprocess(self, hidden_states, input_ids, position_ids, labels: ValuePositions, *args, **kwargs):
        if not self.post_process:
            return hidden_states
        return gather_rows(
            self.value_head(hidden_states, labels.positions), labels.rows, labels.count, self.pg_collection.cp
        )


def transformer_config(
    shape: ModelShape, model: ModelConfig, parallel: ParallelConfig, extra: dict[str, object]
) -> TransformerConfig:
    """Return the Megatron configuration of a Hugging Face shape.

    `extra` holds TransformerConfig fields by their own names."""
    on_cpu = not torch.cuda.is_available()
    dtype = torch.bfloat16 if model.bf16 else torch.float32
    fields = dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        layernorm_zero_centered_gamma=shape.zero_centered_norms,
        qk_layernorm=shape.qk_layernorm or shape.is_mla,
        add_qkv_bias=shape.qkv_bias,
        gated_linear_unit=True,
        activation_func=ACTIVATIONS[shape.activation],
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=fuses_gradient_accumulation(),
        softmax_scale=_softmax_scale(shape),
        **_window_fields(shape),
        params_dtype=dtype,
        bf16=model.bf16,
        pipeline_dtype=dtype,
        use_cpu_initialization=on_cpu,
        # Weights are always loaded afterwards. perform_initialization=False would also skip the
        # tensor_model_parallel marks, and then the gradient norm would count sharded parameters on rank 0
        # only.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        **_virtual_pipeline_fields(parallel),
        sequence_parallel=parallel.sequence_parallel,
        recompute_granularity=parallel.recompute_granularity,
        recompute_method=parallel.recompute_method,
        recompute_num_layers=parallel.recompute_num_layers,
        recompute_modules=list(parallel.recompute_modules) if parallel.recompute_modules else None,
        variable_seq_lengths=parallel.pipeline_model_parallel_size
        > 1,  # packed micro-batches differ in length
        # the default refuses variable_seq_lengths, even for dense models
        moe_token_dispatcher_type="alltoall",
        **(_expert_fields(shape, parallel) if shape.is_moe else {}),
        **(_latent_fields(shape) if shape.is_mla else {}),
        # losses are already divided by their global denominators; Megatron must not divide again
        calculate_per_token_loss=True,
    )
    _check_fp8(extra.get("fp8"))
    return (MLATransformerConfig if shape.is_mla else TransformerConfig)(**(fields | extra))


def _virtual_pipeline_fields(parallel: ParallelConfig) -> dict[str, object]:
    """Return the configuration fields of an interleaved pipeline.

    Messages are not batched. Between two stages the messages of both chunks go to the same rank, and a batch
    would match them in the wrong order."""
    chunks = parallel.virtual_pipeline_model_parallel_size
    return (
        dict(virtual_pipeline_model_parallel_size=chunks, overlap_p2p_comm=True, batch_p2p_comm=False)
        if chunks > 1
        else {}
    )


def _softmax_scale(shape: ModelShape) -> float | None:
    """Return the factor of queries times keys.

    None means 1 / sqrt(head_dim), or the factor that latent attention computes from its own YaRN fields."""
    if shape.is_mla:
        return None
    factor, scalar = attention_factor(shape.rope_scaling), shape.query_pre_attn_scalar
    return None if factor == 1.0 and scalar is None else factor**2 / math.sqrt(scalar or shape.head_dim)


def _window_fields(shape: ModelShape) -> dict[str, object]:
    """Return the configuration fields of sliding-window attention.

    window_size counts the tokens before a token. sliding_window counts the token itself too."""
    if shape.sliding_window is None:
        return {}
    return {
        "window_size": (shape.sliding_window - 1, 0),
        "window_attn_skip_freq": [int(slides) for slides in shape.sliding_layers],
    }


def _expert_fields(shape: ModelShape, parallel: ParallelConfig) -> dict[str, object]:
    """Return the configuration fields of a mixture of experts.

    The router computes in fp32. Its balancing losses are in router.py."""
    return dict(
        num_moe_experts=shape.num_moe_experts,
        moe_ffn_hidden_size=shape.moe_ffn_hidden_size,
        moe_router_topk=shape.moe_router_topk,
        moe_layer_freq=[int(shape.is_moe_layer(layer)) for layer in range(shape.num_layers)],
        moe_shared_expert_intermediate_size=shape.moe_shared_expert_intermediate_size or None,
        moe_shared_expert_gate=shape.moe_shared_expert_gate,
        moe_router_score_function=shape.moe_router_score_function,
        moe_router_topk_scaling_factor=shape.moe_router_topk_scaling_factor,
        moe_router_num_groups=shape.moe_router_num_groups or None,
        moe_router_group_topk=shape.moe_router_group_topk or None,
        # softmax over all experts without rescaling, or over the chosen experts, which equals rescaling to 1
        moe_router_pre_softmax=not shape.norm_topk_prob,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_grouped_gemm=uses_transformer_engine(),
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size
        or parallel.tensor_model_parallel_size,
    )


def _latent_fields(shape: ModelShape) -> dict[str, object]:
    """Return the configuration fields of multi-head latent attention."""
    return dict(
        q_lora_rank=shape.q_lora_rank or None,
        kv_lora_rank=shape.kv_lora_rank,
        v_head_dim=shape.v_head_dim,
        qk_head_dim=shape.head_dim - shape.qk_rope_head_dim,
        qk_pos_emb_head_dim=shape.qk_rope_head_dim,
        rotary_base=shape.rope_theta,
        **_latent_rope_fields(shape.rope_scaling or {}),
    )


def _latent_rope_fields(scaling: dict[str, object]) -> dict[str, object]:
    """Return YaRN's fields for latent attention.

    rotary_scaling_factor 1 leaves the softmax alone. Megatron's default does not."""
    return dict(
        rope_type="yarn" if scaling else "rope",
        rotary_scaling_factor=scaling.get("factor", 1.0),
        original_max_position_embeddings=scaling.get("original_max_position_embeddings", 4096),
        beta_fast=scaling.get("beta_fast", 32),
        beta_slow=scaling.get("beta_slow", 1),
        mscale=scaling.get("mscale", 1.0),
        mscale_all_dim=scaling.get("mscale_all_dim", 0.0),
    )


def _check_fp8(fp8: object) -> None:
    """Raise ValueError if fp8 is requested and this machine cannot compute in fp8."""
    if fp8 and (problem := transformer_engine_problem()) is not None:
        why = "this machine has no GPU" if problem == "no GPU" else f"Transformer Engine here: {problem}"
        rule = "needs an NVIDIA GPU and Transformer Engine"
        raise ValueError(f"--fp8 ({fp8}): {rule}, and {why}. Leave it out.")


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _layer_specs(config: TransformerConfig, shape: ModelShape, qkv_layout: str) -> list[ModuleSpec]:
    """Return the specs of all layers of the model. Layers of one kind share one spec object."""
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
    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp.submodules
    if shape.o_bias:
        attention.linear_proj = with_bias(attention.linear_proj)
    if shape.mlp_bias:
        mlp.linear_fc1, mlp.linear_fc2 = with_bias(mlp.linear_fc1), with_bias(mlp.linear_fc2)
    if shape.output_norms:
        gemma.adapt_spec(spec)
    if config.num_query_groups < config.tensor_model_parallel_size:
        spec.submodules.self_attention.module = SharedKeySelfAttention
    elif qkv_layout == "stacked":
        spec.submodules.self_attention.module = StackedQKVSelfAttention
    if shape.is_mla:
        spec.submodules.self_attention.module = LatentAttention
    if is_moe:
        spec.submodules.mlp.submodules.router = functools.partial(
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


def build_policy_model(
    config: TransformerConfig, shape: ModelShape, groups: ProcessGroupCollection, qkv_layout: str
) -> list[PolicyModel]:
    """Build this rank's stage and shard of a policy, with uninitialised weights, one model per virtual stage.

    Collective over the mesh (tied embeddings)."""
    assert not shape.value_head, "a policy needs the shape of a causal language model"
    return _build(PolicyModel, config, shape, groups, qkv_layout, real_vocab_size=shape.vocab_size)


def build_value_head_model(
    config: TransformerConfig, shape: ModelShape, groups: ProcessGroupCollection, qkv_layout: str
) -> list[ValueHeadModel]:
    """Build this rank's stage and shard of a value model, as `build_policy_model` does for a policy."""
    assert shape.value_head, "a value model needs ModelShape.load(folder, value_head=True)"
    return _build(ValueHeadModel, config, shape, groups, qkv_layout)


def _build(
    kind: type[Model],
    config: TransformerConfig,
    shape: ModelShape,
    groups: ProcessGroupCollection,
    qkv_layout: str,
    **options: object,
) -> list[Model]:
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    return [
        _build_chunk(kind, config, shape, groups, qkv_layout, chunk, num_chunks, **options)
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
    **options: object,
) -> Model:
    stage, last_stage = groups.pp.rank(), groups.pp.size() - 1
    vp_stage = chunk if num_chunks > 1 else None
    with cpu_megatron():
        first, count = (
            get_transformer_layer_offset(config, vp_stage, stage),
            get_num_layers_to_build(config, vp_stage, stage),
        )
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
            **options,
        )
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
