"""The atlas, the sharding spec of a rank: which rectangles of which Hugging Face tensors it holds, and where
in its parameters.

The tensors of the Hugging Face checkpoint are called the canonical matrices. Every matrix is [rows, cols]; a
vector of n elements is [n, 1]. Where two atlases hold the same rectangle, weights can be copied from one to
the other (`plan.py`).

    Example: rank 1 of 2 holds the second half of o_proj's columns, so its atlas has
        "decoder.layers.0.self_attention.linear_proj.weight":
            LocalParam(rows=128, cols=64, pieces=(Piece("model.layers.0.self_attn.o_proj.weight", 0, 128, 64,
            128, 0, 0),))

Model families differ in data only: the tables of this folder list every tensor, and each row says when it
exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megarl.config.hf_config import ModelShape


class Box(NamedTuple):
    """The box [row_start:row_end, col_start:col_end] of a matrix."""

    row_start: int
    row_end: int
    col_start: int
    col_end: int

    @property
    def area(self) -> int:
        return (self.row_end - self.row_start) * (self.col_end - self.col_start)

    def overlap(self, other: Box) -> Box | None:
        if self == other and self.area:  # the usual case, without a new box
            return self
        row, col = max(self.row_start, other.row_start), max(self.col_start, other.col_start)
        end_row, end_col = min(self.row_end, other.row_end), min(self.col_end, other.col_end)
        return Box(row, end_row, col, end_col) if row < end_row and col < end_col else None

    def without(self, other: Box) -> list[Box]:
        """Return this box without the other one, as up to four boxes: above, below, left, right."""
        part = self.overlap(other)
        if part is None or part == self:
            return [] if part else [self]
        rest = [
            self._replace(row_end=part.row_start),
            self._replace(row_start=part.row_end),
            part._replace(col_start=self.col_start, col_end=part.col_start),
            part._replace(col_start=part.col_end, col_end=self.col_end),
        ]
        return [box for box in rest if box.area]

    def within(self, outer: Box) -> tuple[slice, slice]:
        """Return the slices that select this box from a matrix that holds only the box `outer`."""
        row, col = outer.row_start, outer.col_start
        return (
            slice(self.row_start - row, self.row_end - row),
            slice(self.col_start - col, self.col_end - col),
        )

    def __str__(self) -> str:
        return f"[{self.row_start}:{self.row_end}, {self.col_start}:{self.col_end}]"


ORIGIN = Box(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Piece:
    """The rectangle [row_start:row_end, col_start:col_end] of the Hugging Face tensor `hf_name`, which a
    local parameter stores from (local_row, local_col) on."""

    hf_name: str
    row_start: int
    row_end: int
    col_start: int
    col_end: int
    local_row: int
    local_col: int

    @property
    def rows(self) -> int:
        return self.row_end - self.row_start

    @property
    def cols(self) -> int:
        return self.col_end - self.col_start

    @property
    def box(self) -> Box:
        """The piece's rectangle in the Hugging Face tensor."""
        return Box(self.row_start, self.row_end, self.col_start, self.col_end)

    @property
    def local_box(self) -> Box:
        """The piece's rectangle in the local parameter."""
        return Box(self.local_row, self.local_row + self.rows, self.local_col, self.local_col + self.cols)

    def inside(self, tensor):
        """Return the view of a local [rows, cols] tensor that holds this piece."""
        return tensor[self.local_box.within(ORIGIN)]


@dataclass(frozen=True, slots=True)
class LocalParam:
    """A rank's parameter as a [rows, cols] matrix made of pieces of Hugging Face tensors. Its last
    `padding_rows` rows belong to none and stay 0."""

    rows: int
    cols: int
    pieces: tuple[Piece, ...]
    padding_rows: int = 0


Atlas = dict[str, LocalParam]
"""Local parameter name -> what it holds."""


@dataclass(frozen=True, slots=True)
class HFTensor:
    """One tensor of a Hugging Face checkpoint: its sizes by the names of `dimensions`, and the flag of its
    layer's ModelShape without which it is absent."""

    name: str
    rows: str
    cols: str
    needs: str | None = None


def _gated_mlp(
    prefix: str, size: str, needs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[HFTensor, ...]:
    return (
        HFTensor(f"{prefix}{gate}.weight", size, "hidden", needs),
        HFTensor(f"{prefix}{up}.weight", size, "hidden", needs),
        HFTensor(f"{prefix}{down}.weight", "hidden", size, needs),
    )


LAYER_TENSORS = (
    HFTensor("input_layernorm.weight", "hidden", "one"),
    HFTensor("self_attn.q_proj.weight", "query", "hidden", needs="has_query_projection"),
    HFTensor("self_attn.q_proj.bias", "query", "one", needs="qkv_bias"),
    HFTensor("self_attn.k_proj.weight", "key", "hidden", needs="is_gqa"),
    HFTensor("self_attn.k_proj.bias", "key", "one", needs="qkv_bias"),
    HFTensor("self_attn.v_proj.weight", "key", "hidden", needs="is_gqa"),
    HFTensor("self_attn.v_proj.bias", "key", "one", needs="qkv_bias"),
    HFTensor("self_attn.q_norm.weight", "head", "one", needs="qk_layernorm"),
    HFTensor("self_attn.k_norm.weight", "head", "one", needs="qk_layernorm"),
    HFTensor("self_attn.q_a_proj.weight", "query_latent", "hidden", needs="has_query_latent"),
    HFTensor("self_attn.q_a_layernorm.weight", "query_latent", "one", needs="has_query_latent"),
    HFTensor("self_attn.q_b_proj.weight", "query", "query_latent", needs="has_query_latent"),
    HFTensor("self_attn.kv_a_proj_with_mqa.weight", "latent_and_rope", "hidden", needs="is_mla"),
    HFTensor("self_attn.kv_a_layernorm.weight", "latent", "one", needs="is_mla"),
    HFTensor("self_attn.kv_b_proj.weight", "expanded_latent", "latent", needs="is_mla"),
    HFTensor("self_attn.o_proj.weight", "hidden", "attention"),
    HFTensor("self_attn.o_proj.bias", "hidden", "one", needs="o_bias"),
    HFTensor("post_attention_layernorm.weight", "hidden", "one"),
    HFTensor("pre_feedforward_layernorm.weight", "hidden", "one", needs="output_norms"),
    *_gated_mlp("mlp.", "ffn", "is_dense"),
    HFTensor("mlp.gate_proj.bias", "ffn", "one", needs="mlp_bias"),
    HFTensor("mlp.up_proj.bias", "ffn", "one", needs="mlp_bias"),
    HFTensor("mlp.down_proj.bias", "hidden", "one", needs="mlp_bias"),
    HFTensor("post_feedforward_layernorm.weight", "hidden", "one", needs="output_norms"),
    HFTensor("mlp.gate.weight", "experts", "hidden", needs="names_experts"),
    HFTensor("mlp.gate.e_score_correction_bias", "experts", "one", needs="corrects_scores"),
    *_gated_mlp("mlp.shared_experts.", "shared_ffn", "shares_experts"),
    *_gated_mlp("mlp.shared_expert.", "shared_ffn", "gates_shared_expert"),
    HFTensor("mlp.shared_expert_gate.weight", "one", "hidden", needs="gates_shared_expert"),
    HFTensor("block_sparse_moe.gate.weight", "experts", "hidden", needs="names_blocks_sparse"),
)
"""Attention of Qwen2 and Qwen2-MoE (qkv_bias), Qwen3 and Qwen3-MoE (qk_layernorm), Gemma 3 (that and
output_norms), Llama (none, or o_bias), Mistral and Mixtral (none), DeepSeek-V2 and V3 (is_mla); dense layers
(of Llama, mlp_bias or not) and mixtures, of which a model may have both. Names are relative to
`model.layers.<i>.`."""

EXPERT_TENSORS = (
    *_gated_mlp("mlp.experts.{expert}.", "expert_ffn", "names_experts"),
    *_gated_mlp("block_sparse_moe.experts.{expert}.", "expert_ffn", "names_blocks_sparse", "w1", "w3", "w2"),
)
"""Tensors of each expert of a mixture; w1 is the gate, w3 up and w2 down."""

KEPT_IN_FP32 = ("e_score_correction_bias",)
"""Endings of the names of tensors that are fp32 on every side, in a bf16 model and in its files too."""

EMBEDDING, FINAL_NORM, OUTPUT = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
VALUE_HEAD = "score.weight"
"""The value head, which replaces the output layer in critics and reward models: transformers'
...ForSequenceClassification with one label."""


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def dimensions(shape: ModelShape) -> dict[str, int]:
    """Return name -> size of the dimensions that `HFTensor` and the tables name."""
    heads, value_dim = shape.num_attention_heads, shape.v_head_dim if shape.is_mla else shape.head_dim
    return {
        "one": 1,
        "hidden": shape.hidden_size,
        "ffn": shape.ffn_hidden_size,
        "head": shape.head_dim,
        "vocab": shape.vocab_size,
        "query": heads * shape.head_dim,
        "key": shape.num_query_groups * shape.head_dim,
        "attention": heads * value_dim,
        "query_latent": shape.q_lora_rank,
        "latent": shape.kv_lora_rank,
        "latent_and_rope": shape.kv_lora_rank + shape.qk_rope_head_dim,
        "expanded_latent": heads * (shape.head_dim - shape.qk_rope_head_dim + value_dim),
        "experts": shape.num_moe_experts,
        "expert_ffn": shape.moe_ffn_hidden_size,
        "shared_ffn": shape.moe_shared_expert_intermediate_size,
    }


def has(shape: ModelShape, needs: str | None) -> bool:
    return needs is None or getattr(shape, needs)


def hf_sizes(shape: ModelShape) -> Sizes:
    """Return (rows, cols) of every tensor of the checkpoint, in checkpoint order. With tied embeddings
    there is no lm_head.weight, with a value head score.weight instead."""
    size = dimensions(shape)
    sizes = {EMBEDDING: (size["vocab"], size["hidden"])}
    of_kind: dict[bool, Sizes] = {}
    for layer in range(shape.num_layers):
        is_moe = shape.is_moe_layer(layer)
        if is_moe not in of_kind:
            of_kind[is_moe] = _layer_sizes(shape.of_layer(layer), size)
        prefix = layer_prefix(layer)
        sizes |= {prefix + name: rows_cols for name, rows_cols in of_kind[is_moe].items()}
    sizes[FINAL_NORM] = (size["hidden"], 1)
    if shape.value_head:
        sizes[VALUE_HEAD] = (1, size["hidden"])
    elif not shape.tie_word_embeddings:
        sizes[OUTPUT] = (size["vocab"], size["hidden"])
    return sizes


def _layer_sizes(kind: ModelShape, size: dict[str, int]) -> Sizes:
    """Return (rows, cols) of every tensor of a layer, by its name within the layer."""
    tensors = [(tensor.name, tensor) for tensor in LAYER_TENSORS if has(kind, tensor.needs)]
    of_expert = [tensor for tensor in EXPERT_TENSORS if has(kind, tensor.needs)]
    for expert in range(kind.num_moe_experts):
        tensors += [(tensor.name.format(expert=expert), tensor) for tensor in of_expert]
    return {name: (size[tensor.rows], size[tensor.cols]) for name, tensor in tensors}


def whole(hf_name: str, rows: int, cols: int) -> LocalParam:
    """Return a local parameter that is a complete Hugging Face tensor."""
    return LocalParam(rows, cols, (Piece(hf_name, 0, rows, 0, cols, 0, 0),))


def hf_atlas(shape: ModelShape) -> Atlas:
    """Return an atlas (sharding spec) whose parameters are the complete tensors of a Hugging Face folder."""
    return {name: whole(name, *size) for name, size in hf_sizes(shape).items()}


# ------------------------------------------------------------------ how a local parameter is cut out of
# canonical tensors


Sizes = dict[str, tuple[int, int]]
"""Canonical tensor -> (rows, cols)."""


def equal_part(length: int, count: int) -> int:
    """Return the length of one of `count` equal parts, or raise ValueError if `count` does not divide
    `length`.

    The rules of the configuration have reported this with advice."""
    if length % count:
        raise ValueError(f"{length} cannot be cut into {count} equal parts. `megarl check` says what works.")
    return length // count


@dataclass(frozen=True, slots=True)
class Cut:
    """The model and a rank's place in its tensor-parallel group (for experts: the experts' own group), by
    which parameters are cut."""

    shape: ModelShape
    tp_size: int
    tp_rank: int

    def share(self, length: int) -> tuple[int, int]:
        """Return [start, end) of this rank's equal part of a dimension of this length."""
        each = equal_part(length, self.tp_size)
        return self.tp_rank * each, (self.tp_rank + 1) * each


Layout = Callable[[Cut, Sizes, tuple[str, ...]], LocalParam]
"""(cut, sizes of the canonical tensors, names of those that this parameter is made of) -> the local
parameter."""


class Row:
    """One row of the table of Megatron's or vLLM's parameters: a name, how it is cut, and out of which
    Hugging Face tensors.

    Args:
        hf_names: Default: the canonical tensor of the same name. A layer has the parameter if it has all of
            its canonical tensors.
        needs: a flag of the layer's ModelShape without which the parameter is absent all the same."""

    def __init__(self, name: str, layout: Layout, *hf_names: str, needs: str | None = None) -> None:
        self.name, self.layout, self.hf_names, self.needs = name, layout, hf_names or (name,), needs

    def exists(self, kind: ModelShape, sizes: Sizes, hf_prefix: str = "") -> bool:
        """Return whether a layer of this kind has the parameter."""
        names = (hf_prefix + name.format(expert=0) for name in self.hf_names)
        return has(kind, self.needs) and all(name in sizes for name in names)

    def build(self, cut: Cut, sizes: Sizes, hf_prefix: str = "", expert: int | None = None) -> LocalParam:
        """Return the local parameter that this row describes on this rank. `expert` is the number of the
        expert in the checkpoint."""
        names = self.hf_names if expert is None else [name.format(expert=expert) for name in self.hf_names]
        return self.layout(cut, sizes, tuple(hf_prefix + name for name in names))


def replicated(cut: Cut, sizes: Sizes, hf_names: tuple[str, ...]) -> LocalParam:
    """Return a rank's local parameter if every rank has the complete tensor."""
    (name,) = hf_names
    return whole(name, *sizes[name])


def column_shard(cut: Cut, sizes: Sizes, hf_names: tuple[str, ...]) -> LocalParam:
    """Return a rank's local parameter if each rank has an equal part of the columns (row-parallel layers:
    o_proj, down_proj)."""
    (name,) = hf_names
    rows, cols = sizes[name]
    start, end = cut.share(cols)
    return LocalParam(rows, end - start, (Piece(name, 0, rows, start, end, 0, 0),))


def stacked_row_shards(cut: Cut, sizes: Sizes, hf_names: tuple[str, ...]) -> LocalParam:
    """Return a rank's local parameter if it has an equal part of the rows of each tensor, one below the other
    (gate above up)."""
    pieces: list[Piece] = []
    at = 0
    for name in hf_names:
        rows, cols = sizes[name]
        start, end = cut.share(rows)
        pieces.append(Piece(name, start, end, 0, cols, at, 0))
        at += end - start
    return LocalParam(at, sizes[hf_names[0]][1], tuple(pieces))


def every_expert(layout: Layout) -> Layout:
    """Return a layout that stacks what `layout` gives for each expert in one matrix: [E, rows, cols] as [E *
    rows, cols].

    The names of its canonical tensors have the expert's number as `{expert}`."""

    def stacked(cut: Cut, sizes: Sizes, hf_names: tuple[str, ...]) -> LocalParam:
        pieces: list[Piece] = []
        rows = cols = 0
        for expert in range(cut.shape.num_moe_experts):
            one = layout(cut, sizes, tuple(name.format(expert=expert) for name in hf_names))
            pieces += [dataclasses.replace(piece, local_row=rows + piece.local_row) for piece in one.pieces]
            rows, cols = rows + one.rows, one.cols
        return LocalParam(rows, cols, tuple(pieces))

    return stacked


def vocab_shard(cut: Cut, sizes: Sizes, hf_names: tuple[str, ...]) -> LocalParam:
    """Return a rank's local parameter if each rank has an equal part of the vocabulary's rows, padded to a
    multiple of 64 as vLLM does, so that shards of both sides coincide."""
    (name,) = hf_names
    vocab, hidden = sizes[name]
    start, end = cut.share(cut.shape.padded_vocab_size())
    held = max(0, min(end, vocab) - start)
    pieces = (Piece(name, start, start + held, 0, hidden, 0, 0),) if held else ()
    return LocalParam(end - start, hidden, pieces, padding_rows=end - start - held)


def layer_params(
    rows: tuple[Row, ...], cut: Cut, sizes: Sizes, layer: int
) -> Iterator[tuple[str, LocalParam]]:
    """Yield (name within the layer, what this rank holds in it) of every parameter of the checkpoint's layer
    `layer`."""
    kind, prefix = cut.shape.of_layer(layer), layer_prefix(layer)
    for row in rows:
        if row.exists(kind, sizes, prefix):
            yield row.name, row.build(cut, sizes, prefix)
