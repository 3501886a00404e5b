"""Measure a critic before the updates of a step: its values, the returns that it learns, and the variance that it
explains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def critic_sums(returns: Tensor, values: Tensor) -> Tensor:
    """Return [4] fp64, the sums and sums of squares of this rank's returns and values, to add up over ranks."""
    import torch

    exact = [column.double() for column in (returns, values)]
    return torch.stack([part for column in exact for part in (column.sum(), column.square().sum())])


def critic_metrics(num_here: int, advantages: Sequence[float], columns: Sequence[float]) -> dict[str, float]:
    """Return this rank's part of the critic's metrics. The parts of all ranks add up to the metric.

    Metrics: critic/value_mean, critic/return_mean, and critic/explained_variance: 1 - variance of (returns - values)
        / variance of returns; 0 where the returns are equal but for rounding.

    Args:
        num_here: number of tokens on this rank.
        advantages: sum, sum of squares and count of returns - values, over all ranks.
        columns: `critic_sums`, likewise."""
    advantage_sum, advantage_squares, count = advantages
    return_sum, return_squares, value_sum, value_squares = columns
    if count == 0:
        return dict.fromkeys(("critic/value_mean", "critic/return_mean", "critic/explained_variance"), 0.0)
    unexplained = advantage_squares - advantage_sum**2 / count
    variance = return_squares - return_sum**2 / count
    # Returns are values plus advantages in fp32: equal ones differ by 1e-7 of either.
    explained = 0.0 if variance <= 1e-10 * (return_squares + value_squares) else 1 - unexplained / variance
    share = num_here / count
    return {
        "critic/value_mean": value_sum / count * share,
        "critic/return_mean": return_sum / count * share,
        "critic/explained_variance": explained * share,
    }
