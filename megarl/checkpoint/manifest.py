"""Read and write checkpoint.json, which says what a checkpoint holds, and where."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megarl.checkpoint.rectangles import Box, tiling_problem, whole
from megarl.files.checkpoints import MANIFEST, file_digest, read_json, write_json
from megarl.files.writing import reading
from megarl.reshard.hf_folder import some

VERSION, _FORM = 1, "megarl checkpoint"
WEIGHTS = "weights"
"""The kind of tensors that every checkpoint has. Other kinds are the optimizer's."""


class CheckpointError(ValueError):
    """Error of a folder that cannot be read or written as a checkpoint, with the reason."""


class CheckpointIOError(CheckpointError):
    """Error of the file system, as I/O errors or missing rights: the checkpoint may be undamaged."""


@dataclass(frozen=True, slots=True)
class Part:
    file: str
    box: Box


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it is stored. Its parts cover it, each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def key(self, name: str, part: Part) -> str:
        return part_key(name, self.shape, part.box)


def part_key(name: str, shape: tuple[int, ...], box: Box) -> str:
    """Return the key of a rectangle in its safetensors file: the tensor's name, and the bounds unless the
    rectangle is the whole tensor."""
    return (
        name
        if box == whole(shape)
        else f"{name}[{box.row_start}:{box.row_end},{box.col_start}:{box.col_end}]"
    )


@dataclass
class Manifest:
    """The content of checkpoint.json.

    Args:
        files: name -> (bytes, SHA-256).
        tensors: kind -> canonical name -> what is stored of it.
        state: anything that JSON can hold."""

    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    tensors: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    state: dict[str, object] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the manifest and wait until it is on the disk."""
        names = list(self.files)
        number = {name: i for i, name in enumerate(names)}
        tensors = {
            kind: {
                name: {
                    "dtype": str(t.dtype).removeprefix("torch."),
                    "shape": t.shape,
                    "parts": [[number[part.file], *part.box] for part in t.parts],
                }
                for name, t in of_kind.items()
            }
            for kind, of_kind in self.tensors.items()
        }
        body = {
            "files": [[name, *self.files[name]] for name in names],
            "tensors": tensors,
            "state": self.state,
        }
        write_json(folder / MANIFEST, _FORM, VERSION, body)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a folder. Raises: CheckpointError if the folder holds no checkpoint, or a
        damaged one; a file of the wrong size is damage."""
        path = folder / MANIFEST
        try:
            body = read_json(path, _FORM, VERSION, CheckpointError)
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} is not a megarl checkpoint: it has no {MANIFEST}"
                f"{', so writing it did not end' if any(folder.glob('*.safetensors')) else ''}."
            ) from None
        try:
            files = {name: (size, digest) for name, size, digest in body["files"]}
            tensors = {
                kind: {name: _stored_tensor(t, list(files)) for name, t in of_kind.items()}
                for kind, of_kind in body["tensors"].items()
            }
            if bad := [name for name in files if Path(name).name != name or "\0" in name]:
                raise ValueError(f"{bad[0]!r} is not the name of a file in it")
            if not isinstance(body["state"], dict):
                raise TypeError("its state is no object")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"{path} is not of a megarl checkpoint: {type(error).__name__}: {error}."
            ) from error
        manifest = cls(files, tensors, body["state"])
        manifest.check_sizes(folder)
        return manifest

    def check_sizes(self, folder: Path) -> None:
        """Raise CheckpointError naming a file that is missing or has not the size that was written.

        Raises: ReadError for a file that cannot be looked up."""
        for name, (size, _) in self.files.items():
            path = folder / name
            with reading(path):
                found = path.stat().st_size if path.exists() else None
            if found != size:
                raise CheckpointError(
                    f"{path} is {'missing' if found is None else f'damaged: it has {found} bytes'}, "
                    f"and {size} were written."
                )

    def check_digests(self, folder: Path, names: Collection[str]) -> None:
        """Raise CheckpointError naming one of these files whose content is not what was written.

        Raises: ReadError for a file that cannot be read."""
        for name in names:
            with reading(folder / name):
                found = file_digest(folder / name)
            if found != self.files[name][1]:
                raise CheckpointError(
                    f"{folder / name} is damaged: its SHA-256 is not the one that was written."
                )


def _stored_tensor(item: dict[str, object], files: Sequence[str]) -> StoredTensor:
    """Return the tensor that an entry of the manifest describes. Raises KeyError, TypeError, IndexError or
    ValueError if it does not say where all of the tensor is."""
    dtype, shape = getattr(torch, item["dtype"], None), tuple(item["shape"])
    parts = tuple(Part(files[number], Box(*box)) for number, *box in item["parts"])
    if (
        not isinstance(dtype, torch.dtype)
        or not shape
        or not all(type(n) is int and n >= 0 for n in (*shape, *(at for part in parts for at in part.box)))
    ):
        raise ValueError(f"{item['dtype']} of {list(shape)} is no tensor")
    if (problem := tiling_problem(shape, [part.box for part in parts])) is not None:
        raise ValueError(problem)
    return StoredTensor(dtype, shape, parts)


def check_tensors(what: str, found: dict[str, tuple[int, int]], sizes: dict[str, tuple[int, int]]) -> None:
    """Raise CheckpointError if names or (rows, cols) of the found tensors are not those of `sizes`, with a
    list of the differences."""
    problems = [f"{name} is missing" for name in sizes if name not in found]
    problems += [f"{name} is not a tensor of this model" for name in found if name not in sizes]
    problems += [
        f"{name} is {'x'.join(map(str, found[name]))} there and {'x'.join(map(str, size))} by config.json"
        for name, size in sizes.items()
        if found.get(name, size) != size
    ]
    raise_problems(what, problems)


def raise_problems(what: str, problems: Sequence[str]) -> None:
    """Raise CheckpointError that lists the problems of a checkpoint, if there are any."""
    if problems:
        raise CheckpointError(f"{what} do not fit the model: {some(problems)}.")
