"""Find which tensors a Hugging Face folder holds, and whether they are those of its config.json.

Only headers and the index are read, and torch is not imported.

`megarl check`, the loader of training and `megarl convert` all judge a folder by these functions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.hf_config import ModelShape
from megarl.config.hf_families import FAMILIES
from megarl.files.tensor_header import HeaderEntry, TensorFileError, read_header
from megarl.reshard.atlas import EMBEDDING, OUTPUT, VALUE_HEAD, hf_sizes, layer_prefix

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Buffers that old checkpoints carry; transformers ignores them too."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_MOST_NAMED = 5
_COMPARED_PLACES = 4096


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The file of a folder that has a tensor, the tensor's entry in the file's header, and where the
    elements begin in the file."""

    path: Path
    entry: HeaderEntry
    elements: int

    @property
    def size(self) -> tuple[int, ...]:
        """Return (rows, cols); a vector of n is (n, 1). A tensor of more dimensions has its own shape."""
        return self.entry.shape if len(self.entry.shape) >= 2 else (*self.entry.shape, 1)


def read_folder(folder: str | os.PathLike, is_whole: bool = False) -> dict[str, StoredTensor]:
    """Return tensor name -> where it is, from the headers of the files that transformers reads, or of all
    *.safetensors if it would read none.

    transformers prefers model.safetensors to the files of an index.

    Args:
        is_whole: compare an output layer with tied embeddings as a whole, not only at some places.
    Raises: TensorFileError naming every file that is missing or damaged, files that share a tensor, and an
    output layer that differs from tied embeddings; FileNotFoundError without weights."""
    folder = Path(folder)
    config = _config(folder)
    single = folder / (config.get("transformers_weights") or SINGLE)
    file_of = {} if single.is_file() else _read_index(folder)
    paths = [single] if single.is_file() else sorted({*file_of.values()} or folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(
            f"no *.safetensors in {folder}. --random-init starts without weights; convert *.bin files first."
        )
    stored: dict[str, StoredTensor] = {}
    headers: dict[Path, dict[str, HeaderEntry]] = {}
    problems = []
    for path in paths:
        if file_of and not path.exists():
            problems.append(f"{path} is missing; the folder's index names it")
            continue
        try:
            elements, headers[path] = read_header(path)
        except TensorFileError as error:
            problems.append(str(error))
            continue
        problems += [
            f"{name} is in {stored[name].path} and in {path.name}, and only one can count: remove the "
            "files of the other model"
            for name in headers[path].keys() & stored.keys()
        ][:1]
        stored |= {name: StoredTensor(path, entry, elements) for name, entry in headers[path].items()}
    problems += [
        f"{name} is not in {path}, where the folder's index says"
        for name, path in file_of.items()
        if path in headers and name not in headers[path]
    ]
    family = FAMILIES.get(config.get("model_type", ""))
    is_tied = config.get("tie_word_embeddings", family is not None and family.tie_word_embeddings)
    if is_tied and not _are_same(stored.get(OUTPUT), stored.get(EMBEDDING), is_whole):
        problems.append(
            f"{OUTPUT} in {stored[OUTPUT].path} differs from {EMBEDDING}, and tie_word_embeddings is true: "
            'transformers keeps it, vLLM drops it. "tie_word_embeddings": false in config.json keeps it; '
            "without it in the file the embedding is the head"
        )
    if problems:
        raise TensorFileError(f"{some(problems)}.")
    return stored


def _are_same(head: StoredTensor | None, embedding: StoredTensor | None, is_whole: bool) -> bool:
    """Return whether two tensors have the same bits, as far as they are there and compared."""
    if head is None or embedding is None:
        return True
    import numpy as np

    first, second = (
        np.memmap(one.path, "u2", "r", one.elements + one.entry.start, (one.entry.end - one.entry.start) // 2)
        for one in (head, embedding)
    )
    step = 1 if is_whole else len(first) // _COMPARED_PLACES | 1  # odd: not always the same half of a number
    same_size = head.entry.dtype == embedding.entry.dtype and len(first) == len(second)
    return same_size and bool((first[::step] == second[::step]).all())


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


def folder_problem(
    folder: str | os.PathLike, shape: ModelShape | None, by_engine: bool = False
) -> str | None:
    """Return why the weights of a folder cannot be loaded; None if they can. Without a shape only files
    and index are checked.

    Args:
        by_engine: vLLM loads the folder itself. It prefers the files of an index."""
    folder = Path(folder)
    try:
        stored = read_folder(folder)
        if by_engine and {tensor.path for tensor in stored.values()} != {
            *(_read_index(folder).values() or folder.glob("*.safetensors"))
        }:
            return f"{folder}: transformers reads {SINGLE}, vLLM all files or those of {INDEX}. Keep one set"
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
    architectures = _config(Path(folder)).get("architectures")
    return any(name.endswith("ForSequenceClassification") for name in architectures or ())


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _read_index(folder: Path) -> dict[str, Path]:
    """Return tensor name -> file, as the index says; {} if there is no index. Raises: TensorFileError for one
    that cannot be used."""
    path = folder / INDEX
    if not path.exists():
        return {}
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
