"""What a rank of a Megatron-Core 0.16 GPTModel holds.

`linear_qkv` is the delicate one: the full matrix has, for each of the G query groups, the group's query heads, then its key
head, then its value head; rank r of t holds rows [r*S/t, (r+1)*S/t) of it, S = (H + 2G) * head_dim, also when t > G."""

from __future__ import annotations

from dataclasses import replace

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
    check_tensor_parallel,
    column_shard,
    hf_sizes,
    layer_params,
    replicated,
    stacked_row_shards,
    vocab_shard,
)
from megarl.reshard.vllm_atlas import fused_qkv


def grouped_qkv(cut: Cut, sizes: dict[str, tuple[int, int]], hf_names: tuple[str, ...]) -> LocalParam:
    """This rank's rows of the matrix [query heads of group 0; key 0; value 0; query heads of group 1; ...]."""
    query, key, value = hf_names
    groups, head = cut.shape.num_query_groups, cut.shape.head_dim
    query_rows, cols = sizes[query][0] // groups, sizes[query][1]
    start, end = cut.share(sizes[query][0] + 2 * sizes[key][0])
    pieces: list[Piece] = []
    at = 0  # row of the full interleaved matrix
    for group in range(groups):
        for name, length in ((query, query_rows), (key, head), (value, head)):
            first, last = max(at, start), min(at + length, end)
            if first < last:
                hf_row = group * length + first - at
                pieces.append(Piece(name, hf_row, hf_row + last - first, 0, cols, first - start, 0))
            at += length
    return LocalParam(end - start, cols, tuple(pieces))


def _attention(kind: str) -> tuple[str, str, str]:
    return (f"self_attn.q_proj.{kind}", f"self_attn.k_proj.{kind}", f"self_attn.v_proj.{kind}")


LAYER = (
    Row("input_layernorm.weight", replicated, ("input_layernorm.weight",)),
    Row("self_attention.linear_qkv.weight", grouped_qkv, _attention("weight")),
    Row("self_attention.linear_qkv.bias", grouped_qkv, _attention("bias"), needs="qkv_bias"),
    Row("self_attention.q_layernorm.weight", replicated, ("self_attn.q_norm.weight",), needs="qk_layernorm"),
    Row("self_attention.k_layernorm.weight", replicated, ("self_attn.k_norm.weight",), needs="qk_layernorm"),
    Row("self_attention.linear_proj.weight", column_shard, ("self_attn.o_proj.weight",)),
    Row("pre_mlp_layernorm.weight", replicated, ("post_attention_layernorm.weight",)),
    Row("mlp.linear_fc1.weight", stacked_row_shards, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    Row("mlp.linear_fc2.weight", column_shard, ("mlp.down_proj.weight",)),
)

STACKED_QKV_LAYER = tuple(replace(row, layout=fused_qkv) if row.layout is grouped_qkv else row for row in LAYER)
"""With --qkv-layout stacked linear_qkv is [this rank's query heads; its key heads; its value heads], as in vLLM."""

TRANSFORMER_ENGINE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""The Transformer Engine layer spec fuses these norms into the linear layer that follows."""

FIRST_STAGE = (Row("embedding.word_embeddings.weight", vocab_shard, (EMBEDDING,)),)
LAST_STAGE = (Row("decoder.final_layernorm.weight", replicated, (FINAL_NORM,)),)


def megatron_atlas(shape: ModelShape, tp_size: int, tp_rank: int, pp_size: int = 1, pp_rank: int = 0, te_spec: bool = False,
                   qkv_layout: str = "grouped") -> Atlas:  # fmt: skip
    """The atlas of one rank. Layer indices in the names are local to the pipeline stage (uniform split).

    Tied embeddings: a single stage has no output_layer; with several, the last stage's output_layer.weight is a second copy
    of the embedding.

    Args:
        te_spec: names of the Transformer Engine layer spec instead of the local one.
        qkv_layout: grouped (Megatron's own) or stacked; see --qkv-layout.
    Raises: ValueError if the sizes do not divide the model."""
    qkv_rows = (shape.num_attention_heads + 2 * shape.num_query_groups) * shape.head_dim
    check_tensor_parallel(shape, tp_size, "--tensor-model-parallel-size", linear_qkv_rows=qkv_rows)
    if qkv_layout == "stacked" and shape.num_query_groups % tp_size:
        raise ValueError(f"--qkv-layout (stacked) needs whole key heads on each rank: --tensor-model-parallel-size ({tp_size}) must divide "
                         f"num_query_groups ({shape.num_query_groups}). Use --qkv-layout grouped.")
    if shape.num_layers % pp_size:
        works = [str(p) for p in range(1, shape.num_layers + 1) if shape.num_layers % p == 0]
        raise ValueError(f"--pipeline-model-parallel-size ({pp_size}) must divide num_layers ({shape.num_layers}). "
                         f"Sizes that work: {', '.join(works)}.")
    cut, sizes = Cut(shape, tp_size, tp_rank), hf_sizes(shape)
    first, last = pp_rank == 0, pp_rank == pp_size - 1
    atlas: Atlas = {row.name: row.build(cut, sizes) for row in FIRST_STAGE if first}
    per_stage = shape.num_layers // pp_size
    for local in range(per_stage):
        for name, param in layer_params(STACKED_QKV_LAYER if qkv_layout == "stacked" else LAYER, cut, sizes, pp_rank * per_stage + local):
            atlas[f"decoder.layers.{local}.{TRANSFORMER_ENGINE_NAMES.get(name, name) if te_spec else name}"] = param
    atlas |= {row.name: row.build(cut, sizes) for row in LAST_STAGE if last}
    if last and not (shape.tie_word_embeddings and first):
        source = EMBEDDING if shape.tie_word_embeddings else OUTPUT
        atlas["output_layer.weight"] = vocab_shard(cut, sizes, (source,))
    return atlas
