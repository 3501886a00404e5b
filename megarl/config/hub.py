"""Get models and data files from the Hugging Face hub, for flags that name them in place of a folder or file.

--model Qwen/Qwen2.5-0.5B or Qwen/Qwen2.5-0.5B@revision is a model of the hub unless a folder has that path,
and hf://datasets/ORG/NAME/FILE.parquet is a file of a data set. The hub's own cache is read first. Tokens,
HF_HUB_OFFLINE and HF_ENDPOINT have an effect as in the hub's own tools."""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megarl.config.args_file import Occurrence
from megarl.config.errors import Errors
from megarl.config.flags import Word

_NAME = re.compile(r"(.*=)?(hf://datasets/)?((\w[\w.-]*)/[\w.-]+)(?:@([\w.-]+))?(?(2)/(.+))")
_FLAGS = (
    "model tokenizer-model critic-model reference-model reward-model teachers train-data eval-data sft-data"
)
_SMALL = ["*.json", "*.model", "*.txt", "*.jinja"]
to_come: set[str] = set()
"""Folders whose weights are not here yet, as `megarl check` downloads none."""


def localize(given: Mapping[str, Occurrence], sections: Mapping[str, Any], download: bool) -> Errors:
    """Replace names on the hub in the words of flags by paths on this machine, and yield an error for each
    that cannot be had.

    Args:
        given: flag -> its words.
        sections: the configuration that they make.
        download: see `local_path`."""
    num_nodes = max(sections["placement"].nnodes, int(os.environ.get("GROUP_WORLD_SIZE", "1")))
    for flag, one in given.items():
        weights = flag != "tokenizer-model" and not (flag == "model" and sections["model"].random_init)
        for number, word in enumerate(one.words if flag in _FLAGS.split() else ()):
            try:
                path = local_path(word.text, weights, download)
            except ArgumentTypeError as error:
                yield one.error(str(error))
                continue
            one.words[number] = Word(path, word.quoted)
            if num_nodes > 1 and with_names(path) not in (path, word.text):
                yield one.error(f"the caches of nodes may differ: name the commit. Try {with_names(path)}.")


def local_path(name: str, weights: bool = False, download: bool = True) -> str:
    """Return a path on this machine: the name itself, or what it names on the hub, in the hub's cache.

    Args:
        name: may begin with "source=", as in --teachers.
        weights: whether a model's folder must have weights beside configuration and tokenizer.
        download: download weights that are missing. Otherwise a line on stderr says that they are.
    Raises: ArgumentTypeError if the hub does not give it."""
    found = _NAME.fullmatch(name)
    if found is None or os.path.isdir(f"{found[2] or ''}{found[4]}") or os.path.exists(name):
        return name
    source, repo, revision = found[1] or "", found[3], found[5]
    try:
        import huggingface_hub as hub

        if found[2]:
            get = partial(hub.hf_hub_download, repo, found[6], repo_type="dataset", revision=revision)
        else:
            get = partial(
                hub.snapshot_download, repo, revision=revision, ignore_patterns=["*/*", "consolidated*"]
            )
            get = partial(get, allow_patterns=[*_SMALL, "*.safetensors" if weights else "*.json"])
        try:
            path = get(local_files_only=True)
            is_complete = found[2] or os.path.exists(f"{path}/../../trees/{os.path.basename(path)}.json")
            if is_complete or not download and has_weights(path):
                return source + path
        except FileNotFoundError:
            pass
        if found[2] or download or not weights:
            return source + get()
        sys.stderr.write(f"{name}: its weights are not on this machine; training will download them\n")
        to_come.add(path := get(allow_patterns=_SMALL))
        return source + path
    except Exception as error:  # any of a foreign library and its network
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ArgumentTypeError(
            f"{name} is not on this machine, and the hub does not give it. Name what is here, or fill the "
            f"hub's cache with `hf download`. {reason}"
        ) from error


local_model = partial(local_path, weights=True)


def has_weights(folder: str | os.PathLike) -> bool:
    """Return whether a model's folder has weights, or will have them when the hub has given them."""
    return str(folder) in to_come or any(Path(folder).glob("*.safetensors"))


def with_names(text: str) -> str:
    """Return an args file with names on the hub, and their commits, in place of paths in its cache."""
    if "/snapshots/" not in text:
        return text
    from huggingface_hub.constants import HF_HUB_CACHE

    return re.sub(
        rf"{re.escape(str(Path(HF_HUB_CACHE).resolve()))}/(model|dataset)s--(\S+?)--(\S+?)/snapshots/(\w+)",
        lambda found: f"{'hf://datasets/' * (found[1] == 'dataset')}{found[2]}/{found[3]}@{found[4]}",
        text,
    )
