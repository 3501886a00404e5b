"""Whiten advantages over a step: as tensors, and in plain Python as the reference that these are compared
with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megarl.algorithms.base import AdvantageInputs, ReferenceColumn

if TYPE_CHECKING:
    from torch import Tensor


def whitened(inputs: AdvantageInputs, values: Tensor) -> Tensor:
    """Return [N] values of this rank's tokens, whitened over all tokens of the step; 0 where the reward
    failed. Needs one sum over ranks."""
    import torch

    from megarl.kernels.gae import whiten

    is_scored = inputs.spread(~inputs.rewards.isnan())
    exact = values[is_scored].double()
    stats = torch.stack([exact.sum(), exact.square().sum(), exact.new_tensor(float(len(exact)))])
    return whiten(values, is_scored, inputs.sum_over_ranks(stats))


def sums_for_whitening(values: Iterable[float]) -> list[float]:
    """Return sum, sum of squares and count of a rank's values, which `whitened_reference` needs added up over
    all ranks."""
    found = [*values]
    return [math.fsum(found), math.fsum(value * value for value in found), float(len(found))]


def whitened_reference(
    values: Sequence[float], magnitudes: Sequence[float], sums: Sequence[float]
) -> ReferenceColumn:
    """Return the whitened values of one sample, given sums over all values of the step.

    Args:
        sums: sum, sum of squares and count of the values of all samples of the step."""
    total, squares, count = sums
    mean = total / count
    scale = math.sqrt(max(squares - total * mean, 0.0) / max(count - 1, 1) + 1e-8)
    whitened = [(value - mean) / scale for value in values]
    # Mean and deviation are of rounded numbers too.
    sizes = [(size + abs(mean)) / scale * (1 + abs(value)) for size, value in zip(magnitudes, whitened)]
    return ReferenceColumn(values=whitened, magnitudes=sizes)
