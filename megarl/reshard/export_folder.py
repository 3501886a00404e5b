"""Write a folder with an exported model or adapter so that it appears at once and complete."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from huggingface_hub import StateDictSplit
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megarl.config.hf_config import ModelShape
from megarl.files.writing import writing
from megarl.reshard.hf_folder import INDEX

logger = logging.getLogger(__name__)
_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
)


@contextlib.contextmanager
def new_folder(folder: Path, marker: str, kind: str) -> Iterator[Path]:
    """Yield a temporary folder beside `folder`, which replaces `folder` at the end of the block.

    A reader sees the old export or the new one, except for an instant in which there is none. After an error
    the temporary folder is removed, so that a full disk gets its space back. A killed process leaves its
    folders behind, and the next export removes them. One process at a time exports into `folder`.

    Args:
        marker: file that every export of this kind has.
        kind: what the folder holds, for errors.
    Raises: FileExistsError if `folder` holds something else than an export; WriteError."""
    _clean_up(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / marker).exists():
        raise FileExistsError(
            f"{folder} exists and is not {kind}: it has no {marker}. Choose another folder or remove it."
        )
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    with writing(partial):
        partial.mkdir(parents=True)
    try:
        yield partial
        with writing(folder):
            if folder.exists():
                folder.rename(old)
            partial.rename(folder)
    except BaseException:
        _clean_up(folder)
        raise
    _clean_up(folder)


def _clean_up(folder: Path) -> None:
    """Put back the old export if there is no other in its place, and remove the temporary folders beside
    `folder`."""
    name = glob.escape(folder.name)
    for old in folder.parent.glob(f".{name}.old-[0-9]*"):
        if not folder.exists():
            old.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    for partial in folder.parent.glob(f".{name}.partial-[0-9]*"):
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def new_model_folder(
    folder: Path, source: Path, shape: ModelShape, dtype: torch.dtype, tokenizer: Path | None = None
) -> Iterator[Path]:
    """Yield a `new_folder` that has everything of the folder `source` but the weights.

    Args:
        tokenizer: folder or SentencePiece file of the tokenizer. Default: that of `source`."""
    with new_folder(folder, "config.json", "an exported model") as partial:
        own = source if tokenizer is None else tokenizer if tokenizer.is_dir() else tokenizer.parent
        names = {path: path.name for pattern in _TOKENIZER_FILES for path in own.glob(pattern)}
        if tokenizer is not None and tokenizer.is_file():
            names = {path: name for path, name in names.items() if name.startswith("chat_template")}
            names[tokenizer] = "tokenizer.model"
        for path, name in (names | {source / "generation_config.json": "generation_config.json"}).items():
            if path.exists():
                with writing(partial / name):
                    shutil.copy2(path, partial / name)
        config = json.loads((source / "config.json").read_text())
        config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
        if shape.value_head:  # transformers reads num_labels off the labels
            config |= {
                "architectures": [shape.architecture],
                "id2label": {"0": "LABEL_0"},
                "label2id": {"LABEL_0": 0},
            }
            config.pop("num_labels", None)
        if shape.num_nextn_predict_layers:
            logger.warning(
                "%s has none of the layers for multi-token prediction of %s: "
                "num_nextn_predict_layers is 0 in its config.json",
                folder,
                source,
            )
            config["num_nextn_predict_layers"] = 0
        write_json(partial / "config.json", config)
        yield partial


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: Mapping[str, str] = MappingProxyType({"format": "pt"})
) -> None:
    """Write a safetensors file with the permissions of its folder. The library alone writes a file that only
    this user can read.

    Raises: WriteError naming the file; the library's own error is no OSError and names no file."""
    with writing(path):
        try:
            save_file(tensors, path, metadata=dict(metadata))
        except SafetensorError as error:
            code = re.search(r"os error (\d+)", str(error))
            raise (
                OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(errno.EIO, str(error))
            ) from error
        path.chmod(path.parent.stat().st_mode & 0o666)


def write_index(folder: Path, shards: StateDictSplit) -> None:
    """Write the safetensors index of the folder's files, or nothing if there is only one file."""
    if shards.is_sharded:
        write_json(folder / INDEX, {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename})


def write_json(path: Path, content: dict[str, object]) -> None:
    """Write a small JSON file. Raises: WriteError naming it."""
    with writing(path):
        path.write_text(json.dumps(content, indent=2) + "\n")
