"""Write weights that come a few rows at a time, without ranks, into a Hugging Face folder or a megarl
checkpoint.

The memory needed is that of the rows that are just moving, and what the source keeps: of a Megatron
checkpoint the chunks of one tensor."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory

from megarl.checkpoint.manifest import WEIGHTS, CheckpointError, Manifest, Part, StoredTensor
from megarl.checkpoint.rectangles import matrix_size, whole
from megarl.checkpoint.save import publish as publish_checkpoint
from megarl.checkpoint.save import start_folder
from megarl.checkpoint.sources import WeightSource
from megarl.checkpoint.tensor_file import Entry, write_tensors
from megarl.config.hf_config import ModelShape, function_fields
from megarl.files.checkpoints import sync_folder
from megarl.reshard.atlas import KEPT_IN_FP32, hf_sizes
from megarl.reshard.export_folder import new_model_folder, write_index

BLOCK_BYTES = 64 << 20


def write_hf(
    folder: Path,
    source: WeightSource,
    shape: ModelShape,
    config_folder: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    tokenizer: Path | None = None,
) -> None:
    """Write *.safetensors, their index if there are several, and all files of `config_folder` except weights.

    Args:
        dtype: None: that of each tensor in the source.
        tokenizer: where the tokenizer is copied from. Default: `config_folder`.
    Raises: CheckpointError if there is no room; ValueError or OSError if reading or writing fails. `folder`
        is then not there."""
    entries = _entries(source, shape, dtype)
    _check_room(folder, entries)
    shards = _shards(entries, "model", max_shard_bytes)
    with new_model_folder(folder, config_folder, shape, _main_dtype(entries), tokenizer) as partial:
        for file, names in shards.filename_to_tensors.items():
            write_tensors(partial / file, [entries[name] for name in names])
        write_index(partial, shards)
        sync_folder(partial)


def write_checkpoint(
    folder: Path, source: WeightSource, shape: ModelShape, dtype: torch.dtype | None, max_shard_bytes: int
) -> None:
    """Write a checkpoint that has weights only, every tensor complete in one file. Arguments and errors
    are those of `write_hf`."""
    entries = _entries(source, shape, dtype)
    _check_room(folder, entries)
    shards = _shards(entries, WEIGHTS, max_shard_bytes)
    partial = folder.with_name(f".{folder.name}.partial")
    start_folder(partial, folder)
    manifest = Manifest(
        state={
            "dtype": str(_main_dtype(entries)).removeprefix("torch."),
            "model": function_fields(shape),
            "job": {},
        }
    )
    stored = manifest.tensors.setdefault(WEIGHTS, {})
    try:
        for file, names in shards.filename_to_tensors.items():
            manifest.files[file] = write_tensors(partial / file, [entries[name] for name in names])
            stored |= {
                name: StoredTensor(
                    entries[name].dtype, entries[name].shape, (Part(file, whole(entries[name].shape)),)
                )
                for name in names
            }
        publish_checkpoint(partial, folder, manifest)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def row_blocks(source: WeightSource, name: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the rows of a tensor that are moved together, from the first to the last."""
    dtype, shape = source.tensors[name]
    rows, cols = matrix_size(shape)
    step = max(1, BLOCK_BYTES // (cols * dtype.itemsize))
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _entries(source: WeightSource, shape: ModelShape, dtype: torch.dtype | None) -> dict[str, Entry]:
    """Return Hugging Face name -> the tensor to write, in the order of Hugging Face's checkpoints."""

    def entry(name: str) -> Entry:
        stored, size = source.tensors[name]
        kept = torch.float32 if name.endswith(KEPT_IN_FP32) else dtype or stored
        return Entry(
            name, kept, size, lambda: (source.read(name, *rows) for rows in row_blocks(source, name))
        )

    return {name: entry(name) for name in hf_sizes(shape)}


def _shards(entries: dict[str, Entry], name: str, max_shard_bytes: int) -> StateDictSplit:
    """Return the split of the tensors into files of at most `max_shard_bytes`; a larger tensor has a file of
    its own."""
    return split_state_dict_into_shards_factory(
        entries,
        get_storage_size=lambda entry: entry.num_bytes,
        filename_pattern=f"{name}{{suffix}}.safetensors",
        max_shard_size=max_shard_bytes,
    )


def _main_dtype(entries: dict[str, Entry]) -> torch.dtype:
    """Return the dtype that most bytes of the tensors have."""
    share: dict[torch.dtype, int] = {}
    for entry in entries.values():
        share[entry.dtype] = share.get(entry.dtype, 0) + entry.num_bytes
    return max(share, key=share.__getitem__)


def check_room(folder: Path, source: WeightSource, shape: ModelShape, dtype: torch.dtype) -> None:
    """Raise CheckpointError if the disk has no room for the weights in a dtype."""
    _check_room(folder, _entries(source, shape, dtype))


def _check_room(folder: Path, entries: dict[str, Entry]) -> None:
    """Raise CheckpointError, before the first byte is written, if the disk has no room for all tensors."""
    parent = next(path for path in folder.absolute().parents if path.exists())
    needed, free = sum(entry.num_bytes for entry in entries.values()), shutil.disk_usage(parent).free
    if needed > free:
        raise CheckpointError(
            f"{folder}: {os.strerror(errno.ENOSPC)}: {needed / 1e9:.2f} GB are to be written and "
            f"{free / 1e9:.2f} GB are free there."
        )
