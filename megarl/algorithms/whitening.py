"""Whiten advantages in plain Python, as the reference that a step's advantages are compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megarl.algorithms.base import ReferenceColumn


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
