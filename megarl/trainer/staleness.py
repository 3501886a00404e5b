"""Measure how old the weights were that sampled the tokens of a step.

The age of a token is counted in versions: step s trains version s - 1 of the weights, so a token that version v
sampled has the age s - 1 - v."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megarl.packing import Sample


def staleness_metrics(samples: Sequence[Sample], step: int, bound: int) -> dict[str, float]:
    """Return the metrics staleness/* of a step with at least one sample.

    Args:
        bound: --staleness. Every age up to it has a share, which may be 0."""
    tokens_of_age: Counter[int] = Counter()
    lengths_of_age: dict[int, list[int]] = {}
    for sample in samples:
        for version, count in sample.runs:
            tokens_of_age[step - 1 - version] += count
        lengths_of_age.setdefault(step - 1 - sample.version, []).append(sample.response_length)
    total = tokens_of_age.total()
    metrics = {
        "staleness/mean": sum(age * count for age, count in tokens_of_age.items()) / total,
        "staleness/max": float(max(tokens_of_age)),
        "staleness/mixed": sum(len(sample.runs) > 1 for sample in samples) / len(samples),
    }
    metrics |= {f"staleness/share_{age}": tokens_of_age[age] / total for age in range(bound + 1)}
    return metrics | {
        f"staleness/length_mean_{age}": sum(lengths) / len(lengths)
        for age, lengths in sorted(lengths_of_age.items())
    }
