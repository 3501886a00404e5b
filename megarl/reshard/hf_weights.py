"""Load weights from a Hugging Face folder into a rank's parameters, and write the parameters of all ranks as
such a folder."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from safetensors import safe_open
from torch import Tensor

from megarl.config.hf_config import ModelShape
from megarl.reshard.atlas import KEPT_IN_FP32, VALUE_HEAD, Atlas, Piece, Sizes, hf_atlas, hf_sizes
from megarl.reshard.export_folder import new_model_folder, save_tensors, write_index
from megarl.reshard.hf_folder import (
    is_sequence_classifier,
    misfit,
    prediction_layers,
    read_folder,
    tensor_problems,
)
from megarl.reshard.plan import RectCopy, ReshardPlan, make_plan
from megarl.reshard.transfer import Transfer

logger = logging.getLogger(__name__)
MAX_SHARD_BYTES = 5 * 10**9


@torch.no_grad()
def load_hf(
    folder: str | os.PathLike, atlas: Atlas, tensors: dict[str, Tensor], shape: ModelShape | None = None
) -> None:
    """Fill this rank's parameters from the *.safetensors files of `folder`, reading no byte that is not
    needed. Not collective.

    A value head is read from the folder of a sequence classifier. From that of a causal language model, which
    has none, it starts at zero: every value is then 0, and a critic's advantages begin as discounted returns.

    Args:
        atlas: what this rank holds; tensors: its parameters by the same names, each a [rows, cols] view.
            Padding becomes 0; values are converted to each parameter's dtype.
        shape: if given, tensors of the folder that this model does not have, or that are of another size, are
            an error too.
    Raises: ValueError listing tensors that are missing, unexpected or of another size, or naming a file that
        is damaged; FileNotFoundError without weights."""
    stored = read_folder(folder, is_whole=True)
    if not is_sequence_classifier(folder):
        atlas = _without_value_head(atlas, tensors)
    needed = {piece.hf_name for param in atlas.values() for piece in param.pieces}
    problems = [f"{name} is missing" for name in sorted(needed - stored.keys())]
    if shape is not None:
        problems = tensor_problems(folder, stored, shape)
        note_prediction_tensors(folder, stored, shape)
    if problems:
        raise ValueError(misfit(folder, problems))
    file_of = {name: tensor.path for name, tensor in stored.items()}
    files = {path: safe_open(path, framework="pt") for path in {file_of[name] for name in needed}}
    for name, param in atlas.items():
        if param.padding_rows:
            tensors[name][param.rows - param.padding_rows :].zero_()
        for piece in param.pieces:
            part = _read(files[file_of[piece.hf_name]].get_slice(piece.hf_name), piece, folder)
            piece.inside(tensors[name]).copy_(part)


def note_prediction_tensors(folder: str | os.PathLike, names: Iterable[str], shape: ModelShape) -> None:
    """Log on rank 0 which tensors of the folder are left out because they are of layers for multi-token
    prediction."""
    layers = prediction_layers(shape)
    found = [name for name in names if name.startswith(layers)]
    if found and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "%s: the %d tensors of %s predict further tokens. They are left out: neither trained "
            "nor exported.",
            folder,
            len(found),
            " and ".join(f"{layer}*" for layer in layers),
        )


def _without_value_head(atlas: Atlas, tensors: dict[str, Tensor]) -> Atlas:
    """Set the value head, if there is one, to 0, and return the atlas (sharding spec) without it."""
    heads = {
        name for name, param in atlas.items() if any(piece.hf_name == VALUE_HEAD for piece in param.pieces)
    }
    for name in heads:
        tensors[name].zero_()
    return {name: param for name, param in atlas.items() if name not in heads}


def _read(stored, piece: Piece, folder: str | os.PathLike) -> Tensor:
    """Return a piece's rectangle [rows, cols], read from a safetensors slice. Raises ValueError if the tensor
    is too small."""
    size = stored.get_shape()
    rows, cols = (*size, 1)[:2]
    if piece.row_end > rows or piece.col_end > cols:
        raise ValueError(
            f"{piece.hf_name} in {folder} has shape {size}, but by config.json it has at least "
            f"{piece.row_end} rows and "
            f"{piece.col_end} columns."
        )
    if len(size) == 1:
        return stored[piece.row_start : piece.row_end].unsqueeze(1)
    if (piece.col_start, piece.col_end) == (0, cols):
        return stored[piece.row_start : piece.row_end]
    return stored[piece.row_start : piece.row_end, piece.col_start : piece.col_end]


def checkpoint_sizes(folder: str | os.PathLike) -> Sizes:
    """Return (rows, cols) of every tensor in the *.safetensors files of `folder`; a vector of n is (n, 1).

    Raises: ValueError naming a tensor of more dimensions; FileNotFoundError without weights."""
    stored = read_folder(folder)
    for name, tensor in stored.items():
        if not 1 <= len(tensor.entry.shape) <= 2:
            raise ValueError(
                f"{name} in {folder} has shape {list(tensor.entry.shape)}: only vectors and "
                "matrices can be transferred."
            )
    return {name: tensor.size for name, tensor in stored.items()}


@torch.no_grad()
def save_hf(
    folder: str | os.PathLike,
    source_folder: str | os.PathLike,
    shape: ModelShape,
    atlases: dict[int, Atlas],
    tensors: dict[str, Tensor],
    tokenizer: str | None = None,
    complete: Callable[[Path], None] | None = None,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the model that the ranks of `atlases` hold as a Hugging Face folder. Collective over those ranks.

    The lowest rank collects one tensor after the other and writes; it holds at most one shard file of full
    tensors. The folder appears at once and complete: a new one replaces an old export.

    Args:
        source_folder: where config.json (a value head makes it that of a sequence classifier with one label),
            generation_config.json and the tokenizer files are copied from.
        tensors: this rank's [rows, cols] parameters by the names of its atlas.
        dtype: of the files, but of `KEPT_IN_FP32`. Default: that of the parameters.
        tokenizer: where the tokenizer is copied from. Default: `source_folder`.
        complete: changes what the finished folder has besides weights, before it appears.
    Raises: FileExistsError if `folder` holds something that is not an export; WriteError naming a file that
        cannot be written."""
    root, rank = min(atlases), dist.get_rank() if dist.is_initialized() else 0
    dtype, sizes = dtype or next(iter(tensors.values())).dtype, hf_sizes(shape)
    plans = _plan_per_tensor(make_plan(atlases, {root: hf_atlas(shape)}))
    shards = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size[0] * size[1] * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    files = _gathered_files(shards, plans, sizes, tensors, dtype, rank == root)
    if rank != root:
        deque(files, maxlen=0)
        return
    own_tokenizer = None if tokenizer is None else Path(tokenizer)
    with new_model_folder(Path(folder), Path(source_folder), shape, dtype, own_tokenizer) as partial:
        for file, full in files:
            save_tensors(full, partial / file)
        write_index(partial, shards)
        if complete is not None:
            complete(partial)


def _gathered_files(
    shards: StateDictSplit,
    plans: dict[str, ReshardPlan],
    sizes: Sizes,
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    is_root: bool,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the name of each file and its full tensors, which only the root has. Collective over the ranks of
    the plans."""
    rank, device = dist.get_rank() if dist.is_initialized() else 0, next(iter(tensors.values())).device
    for file, names in shards.filename_to_tensors.items():
        full: dict[str, Tensor] = {}
        for name in names:
            kept = torch.float32 if name.endswith(KEPT_IN_FP32) else dtype
            target = {name: torch.empty(sizes[name], dtype=kept, device=device)} if is_root else {}
            if rank in plans[name].ranks:
                Transfer(plans[name], rank, tensors, target, {name: kept}).run()
            if is_root:
                full[name] = (target[name].flatten() if sizes[name][1] == 1 else target[name]).cpu()
        yield file, full


def _plan_per_tensor(plan: ReshardPlan) -> dict[str, ReshardPlan]:
    """Return name of a destination tensor -> the plan of the copies into this tensor alone."""
    per_tensor: dict[str, dict[tuple[int, int], list[RectCopy]]] = {}
    for pair, copies in plan.copies.items():
        for copy in copies:
            per_tensor.setdefault(copy.dst_name, {}).setdefault(pair, []).append(copy)
    return {
        name: ReshardPlan({pair: tuple(copies) for pair, copies in pairs.items()})
        for name, pairs in per_tensor.items()
    }
