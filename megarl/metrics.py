"""Combine the metrics of several ranks into one number per name: a sum or, by the name, a maximum.

Names with a part `max_...` or `..._max` are maxima. All others are sums: losses and means come from the ranks
already divided by their global denominators."""

from __future__ import annotations

import re
from collections.abc import Iterable

_OLD_NAMES = re.compile(r"(eval(?:_\d+)?)/accuracy(_greedy)?")
"""Names of earlier versions, which called every held-out reward an accuracy."""


def current_name(name: str) -> str:
    """Return the name that a metric has now, e.g. eval/reward for eval/accuracy, or else the name itself."""
    return _OLD_NAMES.sub(r"\1/reward\2", name) if _OLD_NAMES.fullmatch(name) else name


def is_maximum(name: str) -> bool:
    """Return whether a metric is combined by its maximum, e.g. mismatch/max_abs, and not by a sum, as
    policy/loss is."""
    last = name.rsplit("/", 1)[-1]
    return last.startswith("max_") or last.endswith("_max")


def combine(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return one dict of metrics from those of several ranks or micro-batches: sums, or maxima by name. A
    part may be {} or None."""
    out: dict[str, float] = {}
    for part in parts:
        for name, value in (part or {}).items():
            if name not in out:
                out[name] = value
            else:
                out[name] = max(out[name], value) if is_maximum(name) else out[name] + value
    return out


def mean_over_updates(per_update: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the updates of a step. Maxima stay maxima; no updates give {}."""
    return {
        name: max(m[name] for m in per_update)
        if is_maximum(name)
        else sum(m[name] for m in per_update) / len(per_update)
        for name in (per_update[0] if per_update else ())
    }
