"""Derive the sharding spec (atlas) of LoRA adapters from that of the matrices that they adapt.

The canonical tensors of adapter rank r, for a layer whose matrix is made of the canonical matrices X [rows,
cols] of one parent:

    <parent>.<layer>.lora_A.weight     [r, cols]     one for the whole layer, e.g. model.layers.0.self_attn.linear_qkv.lora_A.weight
    <X>.lora_B.weight                  [rows, r]     e.g. model.layers.0.self_attn.q_proj.lora_B.weight

A rank that holds the rectangle [rows a:b, cols c:d] of X holds rows a:b of X's B, and columns c:d of the
layer's A: so any split of the matrices, by any kind of parallelism, is one of the adapters too. In the PEFT
format each X has an A of its own, here a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megarl.config.hf_config import ModelShape
from megarl.config.schema import LoRAConfig
from megarl.reshard.atlas import Atlas, LocalParam, Piece, Sizes, hf_sizes, whole
from megarl.reshard.megatron_atlas import MegatronPlace, place_atlas


def with_adapters(atlas: Atlas, lora: LoRAConfig) -> Atlas:
    """Return a copy of this atlas (sharding spec) with the LoRA adapters of the layers that
    --lora-target-modules names."""
    rank, adapters = lora.lora_rank, {}
    for name, target, param in _adapted(atlas, lora.lora_target_modules):
        columns = {
            (_down(piece.hf_name, target), piece.col_start, piece.col_end, piece.local_col)
            for piece in param.pieces
        }
        adapters[f"{name}.adapter.linear_in.weight"] = LocalParam(
            rank,
            param.cols,
            tuple(Piece(down, 0, rank, start, end, 0, at) for down, start, end, at in sorted(columns)),
        )
        adapters[f"{name}.adapter.linear_out.weight"] = LocalParam(
            param.rows,
            rank,
            tuple(
                Piece(_up(p.hf_name), p.row_start, p.row_end, 0, rank, p.local_row, 0) for p in param.pieces
            ),
        )
    return atlas | adapters


def adapter_sizes(shape: ModelShape, lora: LoRAConfig) -> Sizes:
    """Return (rows, cols) of every canonical tensor of the model's LoRA adapters (lora_A and lora_B), by
    name."""
    found: Sizes = {}
    for hf_name, target, rows, cols in _canonical(shape, lora):
        found |= {_down(hf_name, target): (lora.lora_rank, cols), _up(hf_name): (rows, lora.lora_rank)}
    return found


def peft_atlas(shape: ModelShape, lora: LoRAConfig) -> Atlas:
    """Return an atlas (sharding spec) whose parameters are the complete tensors of a PEFT adapter, under
    PEFT's names."""
    atlas: Atlas = {}
    for hf_name, target, rows, cols in _canonical(shape, lora):
        module = hf_name.removesuffix(".weight")
        atlas[f"base_model.model.{module}.lora_A.weight"] = whole(
            _down(hf_name, target), lora.lora_rank, cols
        )
        atlas[f"base_model.model.{module}.lora_B.weight"] = whole(_up(hf_name), rows, lora.lora_rank)
    return atlas


def _canonical(shape: ModelShape, lora: LoRAConfig) -> Iterator[tuple[str, str, int, int]]:
    """Yield (Hugging Face matrix that is adapted, last part of the name of the Megatron layer that holds it,
    rows, cols)."""
    sizes = hf_sizes(shape)
    for _, target, param in _adapted(place_atlas(shape, MegatronPlace()), lora.lora_target_modules):
        for hf_name in sorted({piece.hf_name for piece in param.pieces}):
            yield hf_name, target, *sizes[hf_name]


def _adapted(atlas: Atlas, targets: Sequence[str]) -> Iterator[tuple[str, str, LocalParam]]:
    """Yield (layer name, its last part, what its matrix holds) of every layer that has an adapter; experts
    have none."""
    for name, param in atlas.items():
        layer, _, kind = name.rpartition(".")
        target = layer.rpartition(".")[2]
        if kind == "weight" and target in targets and ".experts." not in name:
            yield layer, target, param


def _down(hf_name: str, target: str) -> str:
    return f"{hf_name.rsplit('.', 2)[0]}.{target}.lora_A.weight"


def _up(hf_name: str) -> str:
    return f"{hf_name.removesuffix('.weight')}.lora_B.weight"
