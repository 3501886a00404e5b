"""Compute which Hugging Face tensors the parameters of a transformers 5 model are made of (its atlas).

Most parameters are tensors of the checkpoint under their own names. The experts of a layer are stacked in two
parameters, and Mixtral's layers have other names than its checkpoint."""

from __future__ import annotations

from megarl.config.hf_config import ModelShape
from megarl.reshard.atlas import (
    EMBEDDING,
    FINAL_NORM,
    LAYER_TENSORS,
    OUTPUT,
    Atlas,
    Cut,
    Row,
    every_expert,
    hf_sizes,
    layer_params,
    layer_prefix,
    replicated,
    stacked_row_shards,
    whole,
)

_STACKED = every_expert(stacked_row_shards)
LAYER = (
    *(Row(tensor.name, replicated) for tensor in LAYER_TENSORS if "sparse" not in tensor.name),
    Row(
        "mlp.experts.gate_up_proj",
        _STACKED,
        "mlp.experts.{expert}.gate_proj.weight",
        "mlp.experts.{expert}.up_proj.weight",
    ),
    Row("mlp.experts.down_proj", _STACKED, "mlp.experts.{expert}.down_proj.weight"),
    Row("mlp.gate.weight", replicated, "block_sparse_moe.gate.weight"),
    Row(
        "mlp.experts.gate_up_proj",
        _STACKED,
        "block_sparse_moe.experts.{expert}.w1.weight",
        "block_sparse_moe.experts.{expert}.w3.weight",
    ),
    Row("mlp.experts.down_proj", _STACKED, "block_sparse_moe.experts.{expert}.w2.weight"),
)
"""Parameters of a layer, relative to `model.layers.<i>.`; a layer has those whose Hugging Face tensors it
has."""


def transformers_atlas(shape: ModelShape, tp_size: int = 1, tp_rank: int = 0) -> Atlas:
    """Return parameter name -> the Hugging Face tensors that it holds, for the whole model on one rank.

    Raises: ValueError if tp_size is not 1."""
    if tp_size != 1:
        raise ValueError(f"a transformers model is whole on each rank, not split over {tp_size}.")
    cut, sizes = Cut(shape, 1, 0), hf_sizes(shape)
    atlas: Atlas = {EMBEDDING: whole(EMBEDDING, *sizes[EMBEDDING])}
    for layer in range(shape.num_layers):
        for name, param in layer_params(LAYER, cut, sizes, layer):
            atlas[layer_prefix(layer) + name] = param
    atlas[FINAL_NORM] = whole(FINAL_NORM, *sizes[FINAL_NORM])
    if not shape.tie_word_embeddings:
        atlas[OUTPUT] = whole(OUTPUT, *sizes[OUTPUT])
    return atlas
