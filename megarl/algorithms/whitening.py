"""Whiten advantages over a step: as tensors, and in plain Python as the reference that these are compared
with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from megarl.algorithms.base import AdvantageInputs, ReferenceColumn, ReferenceInputs

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


def whitened_over_samples(values: Tensor, is_valid: Tensor) -> Tensor:
    """Return [S] numbers of a step's samples, each sample counted once, whitened over those that are valid; 0 for the
    others."""
    import torch

    valid = values[is_valid]
    variance = valid.var() if len(valid) > 1 else valid.new_zeros(())
    centred = values - valid.sum() / max(len(valid), 1)
    return (centred * torch.rsqrt(variance + 1e-8)).where(is_valid, 0.0)


def sums_for_whitening(of_samples: Iterable[Sequence[float]]) -> list[float]:
    """Return sum, sum of squares and count of the values of a rank's samples. Added up over all ranks, they are the
    `sums` of the functions below."""
    found = [value for values in of_samples for value in values]
    return [math.fsum(found), math.fsum(value * value for value in found), float(len(found))]


def reference_sums(
    inputs: ReferenceInputs, references: Callable[[ReferenceInputs, int], Mapping[str, ReferenceColumn]]
) -> list[float]:
    """Return `sums_for_whitening` of the advantages of this rank's samples with a reward.

    Args:
        references: returns the columns of one sample before whitening."""
    found = (references(inputs, sample) for sample in inputs.samples if inputs.has_reward(sample))
    return sums_for_whitening(columns["advantages"].values for columns in found)


def whitened_reference(column: ReferenceColumn, sums: Sequence[float]) -> ReferenceColumn:
    """Return the whitened values of one sample, given sums over all values of the step.

    Args:
        sums: sum, sum of squares and count of the values of all samples of the step."""
    total, squares, count = sums
    mean = total / count
    scale = math.sqrt(max(squares - total * mean, 0.0) / max(count - 1, 1) + 1e-8)
    whitened = [(value - mean) / scale for value in column.values]
    # Mean and deviation are of rounded numbers too.
    sizes = [
        (size + abs(mean)) / scale * (1 + abs(value)) for size, value in zip(column.magnitudes, whitened)
    ]
    return ReferenceColumn(values=whitened, magnitudes=sizes)


def whitened_columns(
    inputs: ReferenceInputs, sample: int, columns: Mapping[str, ReferenceColumn]
) -> dict[str, ReferenceColumn]:
    """Return the columns of one sample with whitened advantages, unless its reward failed."""
    found = dict(columns)
    if inputs.has_reward(sample):
        found["advantages"] = whitened_reference(columns["advantages"], inputs.sums)
    return found
