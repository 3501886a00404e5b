"""How per-rank metrics become one number: names with a part `max...` or `..._max` are maxima, all others are
sums.

Losses and means come from the ranks already divided by their global denominators, so sums are right for
them."""

from __future__ import annotations

from collections.abc import Iterable


def is_maximum(name: str) -> bool:
    """True for mismatch/max_abs and policy/ratio_deviation_max; false for policy/loss."""
    last = name.rsplit("/", 1)[-1]
    return last.startswith("max_") or last.endswith("_max")


def combine(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """One dict from those of several ranks or micro-batches; a rank that has nothing to report sends {} or
    None."""
    out: dict[str, float] = {}
    for part in parts:
        for name, value in (part or {}).items():
            if name not in out:
                out[name] = value
            else:
                out[name] = max(out[name], value) if is_maximum(name) else out[name] + value
    return out


def mean_over_updates(per_update: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the optimizer updates of a step; maxima stay maxima. {} of none."""
    return {
        name: max(m[name] for m in per_update)
        if is_maximum(name)
        else sum(m[name] for m in per_update) / len(per_update)
        for name in (per_update[0] if per_update else ())
    }
