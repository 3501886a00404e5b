"""Read the weights of a sharded Megatron checkpoint (`--ckpt-format torch_dist`), as
megatron.core.dist_checkpointing 0.19.2 writes it.

    iter_0000100/
      .metadata          torch.distributed.checkpoint's: global name -> size and chunks; chunk -> file, offset, length. A pickle
      __0_0.distcp, ...  the chunks, each a torch.save of one tensor
      metadata.json      {"sharded_backend": "torch_dist", ...}
      common.pt          arguments and counters; never opened here

Global names are those of a GPTModel without tensor parallelism. Layers that are alike are one tensor,
[layers, ...], and experts a second axis: decoder.layers.mlp.experts.experts.linear_fc1.weight is [layers,
experts, 2 * ffn, hidden]. Layers that differ (dense ones before mixtures) have their number in the name
instead. So the table that the atlas has for one rank says what every tensor is made of.

A pickle can run code when it is read. This one is read with the few classes that it needs, any other is
refused; the chunks are read by torch.load(weights_only=True)."""

from __future__ import annotations

import enum
import importlib
import io
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megarl.checkpoint.manifest import CheckpointError, raise_problems
from megarl.checkpoint.tensor_file import NAMES
from megarl.config.hf_config import ModelShape
from megarl.reshard.atlas import Piece, hf_sizes
from megarl.reshard.megatron_atlas import TRANSFORMER_ENGINE_NAMES, MegatronPlace, place_atlas

LATEST = "latest_checkpointed_iteration.txt"
OF_THE_MODEL = ("decoder.", "embedding.", "output_layer.")
"""Prefixes of the names of the model's tensors; others are the optimizer's or the job's."""
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
        "BytesIOWriteData",
    },
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(str(dtype).removeprefix("torch.") for dtype in NAMES)},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if name not in _ALLOWED.get(module, ()):
            raise CheckpointError(
                f"its .metadata wants {module}.{name}, which no checkpoint's metadata needs"
            )
        return getattr(importlib.import_module(module), name)


def _enum_member(owner: object, name: str) -> enum.Enum:
    """Return a member of an enum, which Python up to 3.11.4 pickles as getattr(its class, its name)."""
    if not (isinstance(owner, type) and issubclass(owner, enum.Enum)):
        raise CheckpointError(
            f"its .metadata wants attribute {name} of {owner!r}, which no checkpoint's metadata needs"
        )
    return owner[name]


def megatron_folder(folder: Path) -> Path | None:
    """Return the folder with .metadata: this one, or that of the last iteration in it. None if the folder is
    not one of Megatron's.

    Raises: CheckpointError for one of Megatron's other formats."""
    if (folder / LATEST).exists():
        iteration = (folder / LATEST).read_text(errors="replace").strip()
        if iteration != "release" and not re.fullmatch("[0-9]{1,18}", iteration):
            raise CheckpointError(
                f"{folder / LATEST} has to hold the number of an iteration, or release, and holds "
                f"{iteration!r:.40}."
            )
        folder = folder / (iteration if iteration == "release" else f"iter_{int(iteration):07d}")
    backend = folder / "metadata.json"
    if backend.exists() and (name := _sharded_backend(backend)) != "torch_dist":
        raise CheckpointError(
            f"{folder} is a Megatron checkpoint in the format {name}; only torch_dist can be read "
            "(--ckpt-format torch_dist)."
        )
    if any(folder.glob("mp_rank_*")):
        raise CheckpointError(
            f"{folder} is a Megatron checkpoint in the old format (mp_rank_...); load it with "
            "Megatron-LM and save it with "
            "--ckpt-format torch_dist."
        )
    return folder if (folder / ".metadata").exists() else None


def _sharded_backend(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())["sharded_backend"]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path} is not a Megatron checkpoint's: {type(error).__name__}: {error}."
        ) from error


def read_metadata(folder: Path) -> Metadata:
    """Return the content of .metadata. Raises CheckpointError if it is damaged, or would run something."""
    try:
        with open(folder / ".metadata", "rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{folder} is refused: {error}.") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(
            f"{folder / '.metadata'} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{folder / '.metadata'} is not the metadata of a checkpoint.")
    return metadata


class _Held(NamedTuple):
    """Place of a rectangle of a Hugging Face tensor in the Megatron checkpoint: the matrix at `index` of the
    leading axes of tensor `key`."""

    key: str
    index: tuple[int, ...]
    piece: Piece


class MegatronWeights:
    """The weights of a sharded Megatron checkpoint of a GPTModel, as a `sources.WeightSource`.

    Raises: CheckpointError naming tensors that this model has and the checkpoint does not, or the other way
    round."""

    dtype = None

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        self._folder, metadata = folder, read_metadata(folder)
        self._stored = {
            name: stored
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self._places = metadata.storage_data
        self._held = self._find(shape)
        sizes = hf_sizes(shape)
        self.tensors = {
            name: (self._stored[held[0].key].properties.dtype, (rows,) if cols == 1 else (rows, cols))
            for name, held in self._held.items()
            for rows, cols in [sizes[name]]
        }
        self._chunks: dict[tuple[int, ...], Tensor] = {}
        self._chunks_of: tuple[str, tuple[int, ...]] | None = None

    def read(self, name: str, row_start: int, row_end: int) -> Tensor:
        dtype, shape = self.tensors[name]
        out, found = torch.empty(row_end - row_start, shape[1] if len(shape) == 2 else 1, dtype=dtype), 0
        for held in self._held[name]:
            piece = held.piece
            first, last = max(row_start, piece.row_start), min(row_end, piece.row_end)
            for row, col, part in self._parts(
                held, first - piece.row_start + piece.local_row, last - piece.row_start + piece.local_row
            ):
                row += piece.row_start - piece.local_row - row_start
                out[row : row + part.shape[0], col : col + part.shape[1]].copy_(part)
                found += part.numel()
        if found != out.numel():
            raise CheckpointError(
                f"{self._folder}: {name} lacks {out.numel() - found} elements in rows {row_start} "
                f"to {row_end}."
            )
        return out

    def check(self) -> None:
        pass  # nothing in the format tells

    def _find(self, shape: ModelShape) -> dict[str, list[_Held]]:
        """Return Hugging Face name -> where the checkpoint has its rectangles. Raises CheckpointError for
        missing or unknown tensors."""
        held: dict[str, list[_Held]] = {}
        used, problems = set(), []
        for local, param in place_atlas(shape, MegatronPlace()).items():
            names = list(_global_names(local))
            key, index = next(((key, index) for key, index in names if key in self._stored), names[0])
            if key not in self._stored:
                problems.append(f"{key} is missing")
                continue
            used.add(key)
            size, axes = self._stored[key].size, len(index)
            rows, cols = (*size[axes:], 1)[:2]
            fits = (
                len(size) - axes in (1, 2)
                and all(i < n for i, n in zip(index, size, strict=False))
                and cols == param.cols
            )
            # the vocabulary may be padded otherwise
            if not fits or (
                rows < param.rows - param.padding_rows
                if param.padding_rows
                else rows != param.rows and "layers" in key
            ):
                problems.append(
                    f"{key} is {'x'.join(map(str, size))} there, and number "
                    f"{'.'.join(map(str, index)) or 0} should be {param.rows}x{param.cols}"
                )
                continue
            for piece in param.pieces:
                held.setdefault(piece.hf_name, []).append(_Held(key, index, piece))
        problems += [
            f"{name} is not a tensor of this model"
            for name in self._stored
            if name.startswith(OF_THE_MODEL) and name not in used and "_extra_state" not in name
        ]
        raise_problems(
            f"the tensors of the Megatron checkpoint {self._folder}", list(dict.fromkeys(problems))
        )
        return held

    def _parts(self, held: _Held, row_start: int, row_end: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (row, column, values) of every part of these rows of a matrix that a saved chunk holds."""
        axes = len(held.index)
        if (
            self._chunks_of != held[:2]
        ):  # several canonical tensors are in one; chunks of others are no longer needed
            self._chunks, self._chunks_of = {}, held[:2]
        for chunk in self._stored[held.key].chunks:
            inside = [i - offset for i, offset in zip(held.index, chunk.offsets, strict=False)]
            row, col = (*chunk.offsets[axes:], 0)[:2]
            first, last = max(row_start, row), min(row_end, row + chunk.sizes[axes])
            if first < last and all(0 <= i < size for i, size in zip(inside, chunk.sizes, strict=False)):
                values = self._chunk(held.key, chunk.offsets)[tuple(inside)]
                yield first, col, values.view(values.shape[0], -1)[first - row : last - row]

    def _chunk(self, key: str, offsets: torch.Size) -> Tensor:
        if tuple(offsets) not in self._chunks:
            place = (self._places or {}).get(MetadataIndex(key, offsets))
            if place is None:
                raise CheckpointError(
                    f"{self._folder}: .metadata does not say where the part of {key} at {tuple(offsets)} is."
                )
            path = self._folder / place.relative_path
            try:
                with open(path, "rb") as file:
                    file.seek(place.offset)
                    stored = file.read(place.length)
                if len(stored) < place.length:
                    raise EOFError(f"{place.length} bytes are to be at {place.offset}")
                self._chunks[tuple(offsets)] = torch.load(
                    io.BytesIO(stored), map_location="cpu", weights_only=True
                )
            except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
                raise CheckpointError(
                    f"{path}: {key} cannot be read, the file is missing, cut short or damaged "
                    f"({type(error).__name__}: "
                    f"{error})."
                ) from error
        return self._chunks[tuple(offsets)]


def _global_names(local: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names under which Megatron may save a parameter of a one-rank model (with its local layer
    spec), each with the parameter's index in the saved tensor."""
    layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", local)
    if layer is None:
        yield local, ()
        return
    number, name = int(layer[1]), layer[2]
    expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.+)", name)
    if expert is None:
        # norms that are fused in Transformer Engine: Megatron's own layers mostly save under these names too
        for alias in dict.fromkeys((TRANSFORMER_ENGINE_NAMES.get(name, (name, None))[0], name)):
            yield f"decoder.layers.{alias}", (number,)
            yield f"decoder.layers.{number}.{alias}", ()
        return
    which, name = int(expert[1]), expert[2]
    yield f"decoder.layers.mlp.experts.experts.{name}", (number, which)
    yield f"decoder.layers.{number}.mlp.experts.experts.{name}", (which,)
    yield f"decoder.layers.{number}.mlp.experts.experts.{which}.{name}", ()
