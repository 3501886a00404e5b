"""Compute which parts of which Hugging Face tensors a rank of a Megatron-Core 0.19 GPTModel holds (its
atlas), for tensor, pipeline, virtual-pipeline, expert and expert-tensor parallelism.

`linear_qkv` is the delicate one: the full matrix has, for each of the G query groups, the group's query
heads, then its key head, then its value head; rank r of t holds rows [r*S/t, (r+1)*S/t) of it, S = (H + 2G) *
head_dim, also when t > G."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.reshard.atlas import (
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    VALUE_HEAD,
    Atlas,
    Cut,
    LocalParam,
    Piece,
    Row,
    Sizes,
    equal_part,
    column_shard,
    has,
    hf_sizes,
    layer_params,
    layer_prefix,
    replicated,
    stacked_row_shards,
    vocab_shard,
)
from megarl.reshard.vllm_atlas import attention_names, fused_qkv


def grouped_qkv(cut: Cut, sizes: Sizes, hf_names: tuple[str, ...]) -> LocalParam:
    """Return this rank's rows of Megatron's linear_qkv: [query heads of group 0; key 0; value 0; query heads
    of group 1; ...]."""
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


def _gate_and_up(prefix: str) -> tuple[str, str]:
    return f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"


LAYER = (
    Row("input_layernorm.weight", replicated),
    Row("self_attention.linear_qkv.weight", grouped_qkv, *attention_names("weight")),
    Row("self_attention.linear_qkv.bias", grouped_qkv, *attention_names("bias")),
    Row("self_attention.q_layernorm.weight", replicated, "self_attn.q_norm.weight"),
    Row("self_attention.k_layernorm.weight", replicated, "self_attn.k_norm.weight"),
    Row(
        "self_attention.linear_q_proj.weight",
        stacked_row_shards,
        "self_attn.q_proj.weight",
        needs="has_plain_query",
    ),
    Row("self_attention.linear_q_down_proj.weight", replicated, "self_attn.q_a_proj.weight"),
    Row("self_attention.q_layernorm.weight", replicated, "self_attn.q_a_layernorm.weight"),
    Row("self_attention.linear_q_up_proj.weight", stacked_row_shards, "self_attn.q_b_proj.weight"),
    Row("self_attention.linear_kv_down_proj.weight", replicated, "self_attn.kv_a_proj_with_mqa.weight"),
    Row("self_attention.kv_layernorm.weight", replicated, "self_attn.kv_a_layernorm.weight"),
    Row("self_attention.linear_kv_up_proj.weight", stacked_row_shards, "self_attn.kv_b_proj.weight"),
    Row("self_attention.linear_proj.weight", column_shard, "self_attn.o_proj.weight"),
    Row("self_attention.linear_proj.bias", replicated, "self_attn.o_proj.bias"),
    Row(
        "self_attention.linear_proj.post_layernorm.weight",
        replicated,
        "post_attention_layernorm.weight",
        needs="output_norms",
    ),
    Row("pre_mlp_layernorm.weight", replicated, "post_attention_layernorm.weight", needs="input_norms_only"),
    Row("pre_mlp_layernorm.weight", replicated, "pre_feedforward_layernorm.weight"),
    Row("mlp.linear_fc2.post_layernorm.weight", replicated, "post_feedforward_layernorm.weight"),
    Row("mlp.linear_fc1.weight", stacked_row_shards, *_gate_and_up("mlp.")),
    Row("mlp.linear_fc2.weight", column_shard, "mlp.down_proj.weight"),
    Row("mlp.linear_fc1.bias", stacked_row_shards, "mlp.gate_proj.bias", "mlp.up_proj.bias"),
    Row("mlp.linear_fc2.bias", replicated, "mlp.down_proj.bias"),
    Row("mlp.router.weight", replicated, "mlp.gate.weight"),
    Row("mlp.router.weight", replicated, "block_sparse_moe.gate.weight"),
    Row("mlp.router.expert_bias", replicated, "mlp.gate.e_score_correction_bias"),
    Row("mlp.shared_experts.linear_fc1.weight", stacked_row_shards, *_gate_and_up("mlp.shared_experts.")),
    Row("mlp.shared_experts.linear_fc2.weight", column_shard, "mlp.shared_experts.down_proj.weight"),
    Row("mlp.shared_experts.linear_fc1.weight", stacked_row_shards, *_gate_and_up("mlp.shared_expert.")),
    Row("mlp.shared_experts.linear_fc2.weight", column_shard, "mlp.shared_expert.down_proj.weight"),
    Row("mlp.shared_experts.gate_weight", replicated, "mlp.shared_expert_gate.weight"),
)
"""Parameters of any layer. Latents of attention are complete on every rank; the matrices that expand them
are split by heads."""

STACKED_QKV_LAYER = tuple(
    Row(row.name, fused_qkv, *row.hf_names, needs=row.needs) if row.layout is grouped_qkv else row
    for row in LAYER
)
"""With --qkv-layout stacked linear_qkv is [this rank's query heads; its key heads; its value heads], as in
vLLM."""

_MIXTRAL = "block_sparse_moe.experts.{expert}."
EXPERT = (
    Row("linear_fc1.weight", stacked_row_shards, *_gate_and_up("mlp.experts.{expert}.")),
    Row("linear_fc2.weight", column_shard, "mlp.experts.{expert}.down_proj.weight"),
    Row("linear_fc1.weight", stacked_row_shards, _MIXTRAL + "w1.weight", _MIXTRAL + "w3.weight"),
    Row("linear_fc2.weight", column_shard, _MIXTRAL + "w2.weight"),
)
"""Parameters of each local expert, cut over the expert tensor-parallel group; `{expert}` is its number in
the checkpoint."""

FIRST_STAGE = (Row("embedding.word_embeddings.weight", vocab_shard, EMBEDDING),)
LAST_STAGE = (
    Row("decoder.final_layernorm.weight", replicated, FINAL_NORM),
    Row("value_head.weight", replicated, VALUE_HEAD),
)


TRANSFORMER_ENGINE_NAMES = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight", "is_gqa"),
    "self_attention.q_layernorm.weight": ("self_attention.linear_q_up_proj.layer_norm_weight", "is_mla"),
    "self_attention.kv_layernorm.weight": ("self_attention.linear_kv_up_proj.layer_norm_weight", "is_mla"),
    "pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "is_dense"),
}
"""The Transformer Engine layer spec fuses a norm into the linear layer that follows it, if one alone does: ->
(name, when)."""


def _transformer_engine_name(kind: ModelShape, name: str) -> str:
    fused, needs = TRANSFORMER_ENGINE_NAMES.get(name, (name, None))
    return fused if has(kind, needs) else name


def _expert_name(name: str, expert: int, te_spec: bool) -> str:
    """Return the name of an expert's parameter. Megatron's sequential experts are modules of their own;
    Transformer Engine's grouped ones number their weights."""
    return f"mlp.experts.{name}{expert}" if te_spec else f"mlp.experts.local_experts.{expert}.{name}"


@dataclass(frozen=True, slots=True)
class MegatronPlace:
    """The parallel sizes of a Megatron model and one rank's place in them. The defaults are one rank.

    Args:
        vpp_size: model chunks per pipeline stage (interleaved virtual pipeline).
        ep_size: expert model parallelism. etp_size, etp_rank: expert tensor parallelism; None: as tp."""

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    vpp_size: int = 1
    ep_size: int = 1
    ep_rank: int = 0
    etp_size: int | None = None
    etp_rank: int | None = None

    @classmethod
    def of(cls, mesh: MeshSpec, rank: int) -> MegatronPlace:
        at = mesh.coordinates(rank)
        return cls(
            mesh.tp, at["tp"], mesh.pp, at["pp"], mesh.vpp, mesh.ep, at["ep"], mesh.expert_tp, at["etp"]
        )

    @property
    def expert_tp(self) -> tuple[int, int]:
        """Return (size, rank) of the group that splits an expert."""
        return (self.tp_size, self.tp_rank) if self.etp_size is None else (self.etp_size, self.etp_rank or 0)


def megatron_atlas(
    shape: ModelShape,
    tp_size: int,
    tp_rank: int,
    pp_size: int = 1,
    pp_rank: int = 0,
    te_spec: bool = False,
    qkv_layout: str = "grouped",
) -> Atlas:
    """Return which parts of Hugging Face tensors one rank holds (its atlas), with tensor and pipeline
    parallelism only."""
    return place_atlas(shape, MegatronPlace(tp_size, tp_rank, pp_size, pp_rank), te_spec, qkv_layout)


def place_atlas(
    shape: ModelShape, place: MegatronPlace, te_spec: bool = False, qkv_layout: str = "grouped"
) -> Atlas:
    """Return parameter name -> the parts of Hugging Face tensors that one rank holds in it (its atlas). Layer
    indices in the names are local to the model chunk; the split over stages is uniform.

    With a virtual pipeline, chunk c of stage p holds the layers from (c * pp_size + p) * L / (pp_size *
    vpp_size) on, and the names of its parameters begin with `chunks.<c>.`.

    Tied embeddings: a single stage has no output_layer; with several, the last stage's output_layer.weight is
    a second copy of the embedding. A value head is on every tensor-parallel rank of the last stage, in place
    of the output_layer.

    Args:
        te_spec: names of the Transformer Engine layer spec (experts grouped) instead of the local one
            (experts sequential).
        qkv_layout: grouped (Megatron's own) or stacked; see --qkv-layout.
    Raises: ValueError if the sizes do not divide the model."""
    if qkv_layout == "stacked":
        equal_part(shape.num_query_groups, place.tp_size)  # each rank needs whole key heads
    rows = STACKED_QKV_LAYER if qkv_layout == "stacked" else LAYER
    cut, sizes = Cut(shape, place.tp_size, place.tp_rank), hf_sizes(shape)
    per_chunk = equal_part(shape.num_layers, place.pp_size * place.vpp_size)
    atlas: Atlas = {}
    for chunk in range(place.vpp_size):
        prefix = f"chunks.{chunk}." if place.vpp_size > 1 else ""
        position, last_position = chunk * place.pp_size + place.pp_rank, place.vpp_size * place.pp_size - 1
        if position == 0:
            atlas |= {prefix + row.name: row.build(cut, sizes) for row in FIRST_STAGE}
        for local in range(per_chunk):
            for name, param in _layer(rows, place, cut, sizes, position * per_chunk + local, te_spec):
                atlas[f"{prefix}decoder.layers.{local}.{name}"] = param
        if position == last_position:
            atlas |= {
                prefix + row.name: row.build(cut, sizes) for row in LAST_STAGE if row.exists(shape, sizes)
            }
            if not shape.value_head and not (shape.tie_word_embeddings and position == 0):
                source = EMBEDDING if shape.tie_word_embeddings else OUTPUT
                atlas[f"{prefix}output_layer.weight"] = vocab_shard(cut, sizes, (source,))
    return atlas


def _layer(
    rows: tuple[Row, ...], place: MegatronPlace, cut: Cut, sizes: Sizes, layer: int, te_spec: bool
) -> Iterator[tuple[str, LocalParam]]:
    """Yield (name within the layer, which parts of which Hugging Face tensors it holds) for this rank's
    parameters of the layer with Hugging Face's number `layer`. Those outside of experts are `rows`."""
    kind = cut.shape.of_layer(layer)
    for name, param in layer_params(rows, cut, sizes, layer):
        yield (_transformer_engine_name(kind, name) if te_spec else name), param
    held, expert_cut = equal_part(kind.num_moe_experts, place.ep_size), Cut(cut.shape, *place.expert_tp)
    present = [row for row in EXPERT if row.exists(kind, sizes, layer_prefix(layer))]
    for local in range(held):
        for row in present:
            param = row.build(expert_cut, sizes, layer_prefix(layer), expert=place.ep_rank * held + local)
            yield _expert_name(row.name, local, te_spec), param


def megatron_atlases(
    shape: ModelShape, mesh: MeshSpec, te_spec: bool = False, qkv_layout: str = "grouped"
) -> dict[int, Atlas]:
    """Return rank -> its atlas (sharding spec), for every rank of a role. Ranks that hold the same rectangles
    have one atlas in common."""
    places = {rank: MegatronPlace.of(mesh, rank) for rank in mesh.ranks}
    built = {
        place: place_atlas(shape, place, te_spec, qkv_layout) for place in dict.fromkeys(places.values())
    }
    return {rank: built[place] for rank, place in places.items()}
