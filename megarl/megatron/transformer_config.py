"""Translate the shape of a Hugging Face model into Megatron's TransformerConfig."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F

from megarl.config.hf_config import ModelShape
from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.megatron.cpu_shim import cpu_megatron
from megarl.megatron.libraries import fuses_gradient_accumulation
from megarl.megatron.rope import attention_factor
from megarl.megatron.transformer_engine import transformer_engine_problem, uses_transformer_engine

with cpu_megatron():
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig


ACTIVATIONS = {"silu": F.silu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}
"""Maps ModelShape.activation to the function for the gate of the MLP."""


def transformer_config(
    shape: ModelShape, model: ModelConfig, parallel: ParallelConfig, extra: dict[str, object]
) -> TransformerConfig:
    """Return the Megatron configuration of a Hugging Face model's shape. Raises ValueError if fp8 is
    requested and this machine cannot compute in it.

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
        **_virtual_pipeline_fields(parallel.virtual_pipeline_model_parallel_size),
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


def _virtual_pipeline_fields(chunks: int) -> dict[str, object]:
    """Return the configuration fields of an interleaved pipeline.

    Messages are not batched. Between two stages the messages of both chunks go to the same rank, and a batch
    would match them in the wrong order."""
    if chunks == 1:
        return {}
    return dict(virtual_pipeline_model_parallel_size=chunks, overlap_p2p_comm=True, batch_p2p_comm=False)


def _softmax_scale(shape: ModelShape) -> float | None:
    """Return the factor by which attention multiplies the products of queries and keys.

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
    """Return the configuration fields of multi-head latent attention.

    rotary_scaling_factor 1 leaves the softmax alone. Megatron's default does not."""
    scaling = shape.rope_scaling or {}
    return dict(
        q_lora_rank=shape.q_lora_rank or None,
        kv_lora_rank=shape.kv_lora_rank,
        v_head_dim=shape.v_head_dim,
        qk_head_dim=shape.head_dim - shape.qk_rope_head_dim,
        qk_pos_emb_head_dim=shape.qk_rope_head_dim,
        rotary_base=shape.rope_theta,
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
