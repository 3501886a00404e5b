"""Find which tensors a Hugging Face folder holds, and whether they are those of its config.json.

Only headers and the index are read, and torch is not imported.

`megarl check`, the loader of training and `megarl convert` all judge a folder by these functions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.config.hf_config import ModelShape
from megarl.files.tensor_header import HeaderEntry, TensorFileError, read_header
from megarl.reshard.atlas import OUTPUT, VALUE_HEAD, hf_sizes, layer_prefix

INDEX = "model.safetensors.index.json"
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Buffers that old checkpoints carry; transformers ignores them too."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The file of a folder that has a tensor, and the tensor's entry in the file's header."""

    path: Path
    entry: HeaderEntry

    @property
    def size(self) -> tuple[int, ...]:
        """Return (rows, cols); a vector of n is (n, 1). A tensor of more dimensions has its own shape."""
        return self.entry.shape if len(self.entry.shape) >= 2 else (*self.entry.shape, 1)


def read_folder(folder: str | os.PathLike) -> dict[str, StoredTensor]:
    """Return tensor name -> where it is, from the headers of all files that the index names, or of all
    *.safetensors if there is no index.

    Raises: TensorFileError naming every file that is missing or damaged; FileNotFoundError without
    weights."""
    folder = Path(folder)
    file_of = _read_index(folder)
    paths = sorted(folder.glob("*.safetensors")) if file_of is None else sorted({*file_of.values()})
    if not paths:
        raise FileNotFoundError(
            f"no *.safetensors in {folder}. --random-init starts without weights; convert *.bin files first."
        )
    headers: dict[Path, dict[str, HeaderEntry]] = {}
    problems = []
    for path in paths:
        if file_of is not None and not path.exists():
            problems.append(f"{path} is missing; the folder's index names it")
            continue
        try:
            headers[path] = read_header(path)[1]
        except TensorFileError as error:
            problems.append(str(error))
    if file_of is None:
        file_of = {name: path for path, header in headers.items() for name in header}
    problems += [
        f"{name} is not in {path}, where the folder's index says"
        for name, path in file_of.items()
        if path in headers and name not in headers[path]
    ]
    if problems:
        raise TensorFileError(f"{some(problems)}.")
    return {name: StoredTensor(path, headers[path][name]) for name, path in file_of.items()}


def tensor_problems(
    folder: str | os.PathLike, stored: Mapping[str, StoredTensor], shape: ModelShape
) -> list[str]:
    """Return one line per tensor that is missing, unknown, or of another size or kind of number than the
    folder's config.json says.

    `shape` may have a value head that the folder of a causal language model lacks: that head then starts at
    zero."""
    sizes = hf_sizes(shape)
    if not is_sequence_classifier(folder):
        sizes.pop(VALUE_HEAD, None)
    ignored = names_left_out(stored, shape)
    problems = [f"{name} is missing" for name in sizes if name not in stored]
    problems += [
        f"{name} is not a tensor of a {shape.model_type} model"
        for name in stored
        if name not in sizes and name not in ignored
    ]
    for name, size in sizes.items():
        if name not in stored:
            continue
        tensor = stored[name]
        if name == VALUE_HEAD and tensor.size[0] != 1:
            problems.append(
                f"{name} in {tensor.path.name} has shape {list(tensor.entry.shape)}: num_labels "
                f"({tensor.size[0]}) must be 1, the value"
            )
        elif tensor.size != size:
            problems.append(
                f"{name} in {tensor.path.name} is {_by(tensor.size)} there and {_by(size)} by config.json"
            )
        elif tensor.entry.dtype not in _FLOATS:
            problems.append(
                f"{name} in {tensor.path.name} is of {tensor.entry.dtype}: quantized weights cannot "
                "be trained"
            )
    return problems


def folder_problem(folder: str | os.PathLike, shape: ModelShape | None) -> str | None:
    """Return why the weights of a folder cannot be loaded; None if they can. Without a shape only files
    and index are checked."""
    try:
        stored = read_folder(folder)
    except (TensorFileError, FileNotFoundError) as error:
        return str(error)
    return misfit(folder, tensor_problems(folder, stored, shape)) if shape is not None else None


def misfit(folder: str | os.PathLike, problems: list[str]) -> str | None:
    """Return a sentence that says that the folder's weights do not fit its config.json, with these problems;
    None if there are none."""
    return f"the weights in {folder} do not fit its config.json: {some(problems)}." if problems else None


def names_left_out(names: Iterable[str], shape: ModelShape) -> set[str]:
    """Return the names of tensors that a folder may have and that are not read: old buffers, a tied
    embedding's copy, layers for multi-token prediction."""
    further = prediction_layers(shape)
    return {
        name
        for name in names
        if name == OUTPUT or name.endswith(IGNORED_SUFFIXES) or name.startswith(further)
    } - hf_sizes(shape).keys()


def prediction_layers(shape: ModelShape) -> tuple[str, ...]:
    """Return the name prefixes of the layers for multi-token prediction, which checkpoints number after the
    model's own layers."""
    return tuple(
        layer_prefix(shape.num_layers + further) for further in range(shape.num_nextn_predict_layers)
    )


def is_sequence_classifier(folder: str | os.PathLike) -> bool:
    """Return whether config.json names a sequence classifier, whose folder has a value head."""
    config = Path(folder) / "config.json"
    architectures = json.loads(config.read_text()).get("architectures") if config.exists() else None
    return any(name.endswith("ForSequenceClassification") for name in architectures or ())


def _read_index(folder: Path) -> dict[str, Path] | None:
    """Return tensor name -> file, as the index says; None if there is no index. Raises: TensorFileError
    for one that cannot be used."""
    path = folder / INDEX
    if not path.exists():
        return None
    try:
        file_of = {
            name: folder / file
            for name, file in json.loads(path.read_text(encoding="utf-8"))["weight_map"].items()
        }
    except (OSError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise TensorFileError(f"{path} is not an index: {type(error).__name__}: {error}") from error
    if not file_of:
        raise TensorFileError(f"{path} is not an index: its weight_map is empty")
    if bad := [file for file in file_of.values() if file.parent != folder or "\0" in file.name]:
        raise TensorFileError(f"{path} names {str(bad[0])!r}, which is not a file of its folder")
    return file_of


def some(problems: Sequence[str]) -> str:
    """Return the first problems joined by semicolons, with the number of the others."""
    more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
    return "; ".join(problems[:_MOST_NAMED]) + more


def _by(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size))
