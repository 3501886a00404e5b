"""Compute which parts of which Hugging Face tensors a rank of a vLLM 0.32 decoder holds (its atlas), for
Qwen2, Qwen3, Qwen3-MoE, Llama, Mistral, Mixtral and Gemma 3."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config.hf_config import ModelShape
from megarl.reshard.atlas import (
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    Atlas,
    Cut,
    LocalParam,
    Piece,
    Row,
    Sizes,
    column_shard,
    every_expert,
    hf_sizes,
    layer_params,
    layer_prefix,
    replicated,
    stacked_row_shards,
    vocab_shard,
)


def fused_qkv(cut: Cut, sizes: Sizes, hf_names: tuple[str, ...]) -> LocalParam:
    """Return this rank's rows of vLLM's qkv_proj: [its query heads; its key heads; its value heads]. If there
    are more ranks than key heads, several ranks share each key head."""
    query, key, value = hf_names
    groups, head = cut.shape.num_query_groups, cut.shape.head_dim
    start, end = cut.share(sizes[query][0])
    cols, num_heads = sizes[query][1], max(1, groups // cut.tp_size)
    first = cut.tp_rank * num_heads if groups >= cut.tp_size else cut.tp_rank // (cut.tp_size // groups)
    key_start, key_rows = first * head, num_heads * head
    pieces = [Piece(query, start, end, 0, cols, 0, 0)]
    for index, name in enumerate((key, value)):
        pieces.append(
            Piece(name, key_start, key_start + key_rows, 0, cols, end - start + index * key_rows, 0)
        )
    return LocalParam(end - start + 2 * key_rows, cols, tuple(pieces))


def attention_names(kind: str) -> tuple[str, str, str]:
    """Return the names of the Hugging Face weights or biases (`kind`) of queries, keys and values."""
    return (f"self_attn.q_proj.{kind}", f"self_attn.k_proj.{kind}", f"self_attn.v_proj.{kind}")


LAYER = (
    Row("input_layernorm.weight", replicated),
    Row("self_attn.qkv_proj.weight", fused_qkv, *attention_names("weight")),
    Row("self_attn.qkv_proj.bias", fused_qkv, *attention_names("bias")),
    Row("self_attn.q_norm.weight", replicated),
    Row("self_attn.k_norm.weight", replicated),
    Row("self_attn.o_proj.weight", column_shard),
    Row("self_attn.o_proj.bias", replicated),
    Row("post_attention_layernorm.weight", replicated),
    Row("pre_feedforward_layernorm.weight", replicated),
    Row("post_feedforward_layernorm.weight", replicated),
    Row("mlp.gate_up_proj.weight", stacked_row_shards, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    Row("mlp.down_proj.weight", column_shard),
    Row("mlp.gate_up_proj.bias", stacked_row_shards, "mlp.gate_proj.bias", "mlp.up_proj.bias"),
    Row("mlp.down_proj.bias", replicated),
    Row("mlp.gate.weight", replicated),
    Row(
        "mlp.experts.routed_experts.w13_weight",
        every_expert(stacked_row_shards),
        "mlp.experts.{expert}.gate_proj.weight",
        "mlp.experts.{expert}.up_proj.weight",
    ),
    Row(
        "mlp.experts.routed_experts.w2_weight",
        every_expert(column_shard),
        "mlp.experts.{expert}.down_proj.weight",
    ),
    Row("block_sparse_moe.gate.weight", replicated),
    Row(
        "block_sparse_moe.experts.routed_experts.w13_weight",
        every_expert(stacked_row_shards),
        "block_sparse_moe.experts.{expert}.w1.weight",
        "block_sparse_moe.experts.{expert}.w3.weight",
    ),
    Row(
        "block_sparse_moe.experts.routed_experts.w2_weight",
        every_expert(column_shard),
        "block_sparse_moe.experts.{expert}.w2.weight",
    ),
)
"""The experts are [E, 2F/t, h] and [E, h, F/t]: this is their order as the model is loaded. A backend may
store them otherwise (`expose_weights` in megarl/rollout)."""

TABLES = {
    "qwen2": LAYER,
    "qwen3": LAYER,
    "qwen3_moe": LAYER,
    "llama": LAYER,
    "mistral": LAYER,
    "mixtral": LAYER,
    "gemma3_text": LAYER,
}
"""model_type -> its layers. For any other type the engine derives the atlas from vLLM's own loader
(megarl/rollout/trace.py)."""


def vllm_atlas(shape: ModelShape, tp_size: int, tp_rank: int) -> Atlas:
    """Return parameter name -> the parts of Hugging Face tensors that one rank holds in it (its atlas).
    Raises ValueError if tp_size does not divide the model, or its type has no table."""
    if shape.model_type not in TABLES:
        raise ValueError(
            f"model_type ({shape.model_type}): there is no table of vLLM's layout, only of "
            f"{', '.join(TABLES)}. An engine reads "
            "it off vLLM's loader when it starts."
        )
    cut, sizes = Cut(shape, tp_size, tp_rank), hf_sizes(shape)
    atlas: Atlas = {EMBEDDING: vocab_shard(cut, sizes, (EMBEDDING,))}
    for layer in range(shape.num_layers):
        for name, param in layer_params(TABLES[shape.model_type], cut, sizes, layer):
            atlas[layer_prefix(layer) + name] = param
    atlas[FINAL_NORM] = replicated(cut, sizes, (FINAL_NORM,))
    if not shape.tie_word_embeddings:
        atlas[OUTPUT] = vocab_shard(cut, sizes, (OUTPUT,))
    return atlas


def vllm_atlases(shape: ModelShape, ranks: Sequence[int], tp_size: int) -> dict[int, Atlas]:
    """Return rollout rank -> its atlas (sharding spec). Engines are consecutive blocks of tp_size ranks."""
    of_tp_rank = [vllm_atlas(shape, tp_size, tp_rank) for tp_rank in range(tp_size)]
    return {rank: of_tp_rank[index % tp_size] for index, rank in enumerate(ranks)}
