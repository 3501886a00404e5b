"""Find the parameters of an engine that can be the trainer's own memory: what both hold in the same shape
and order needs no copy."""

from __future__ import annotations

from collections.abc import Hashable

from megarl.reshard.atlas import Atlas, LocalParam


def find_aliases(source: Atlas, destination: Atlas) -> dict[str, str]:
    """Return engine parameter -> the trainer's parameter on the same rank that holds the same numbers at the
    same places.

    Their dtypes are the caller's to compare. Where several source parameters do (a tied output layer), the
    first is taken."""
    holder: dict[Hashable, str] = {}
    for name, param in source.items():
        holder.setdefault(_content(param), name)
    return {name: holder[_content(param)] for name, param in destination.items() if _content(param) in holder}


def without(destination: Atlas, aliases: dict[str, str]) -> Atlas:
    """Return the engine's atlas (sharding spec) without the parameters that share the trainer's memory: what
    is left to be copied."""
    return {name: param for name, param in destination.items() if name not in aliases}


def _content(param: LocalParam) -> Hashable:
    return param.rows, param.cols, param.padding_rows, frozenset(param.pieces)
