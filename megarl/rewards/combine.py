"""Combine several scores of a sample into its reward."""

from __future__ import annotations

from collections.abc import Sequence


def combine_rewards(parts: Sequence[Sequence[float | None]], weights: Sequence[float]) -> list[float | None]:
    """Return per sample the sum of weight * score over the parts; None, a failed reward, where any part
    failed.

    Args:
        parts: per reward model (and rule reward), the scores of all samples in the same order.
        weights: one per part.
    Raises: ValueError if the numbers of parts and weights, or of samples, differ."""
    if not parts or len(parts) != len(weights):
        raise ValueError(
            f"{len(parts)} lists of scores and {len(weights)} weights: there must be one weight per "
            "list, and at least one."
        )
    return [
        None if None in scores else sum(weight * score for weight, score in zip(weights, scores, strict=True))
        for scores in zip(*parts, strict=True)
    ]
