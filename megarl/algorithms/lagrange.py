"""Choose the factor of a constraint's cost in each step (Safe RLHF, arXiv:2310.12773, eq. 31).

    ln lambda += lr lambda (mean cost - limit)

Plain floats: the driver runs this between two steps, in a process without torch."""

from __future__ import annotations

import math

MEAN_COST = "cost/mean"
"""The metric of `compute_advantages` to update with: the mean cost of the step's responses."""
_SMALLEST_LOG = -700.0
"""Logarithm of the smallest multiplier. A multiplier of 0 could never rise again."""


class LagrangeMultiplier:
    """The multiplier of a run.

    Args:
        start: value of the first step, above 0.
        lr: how fast it follows; 0 keeps it.
        limit: the mean cost of a response that is allowed.
        largest: bound of the value, at least `start`. The steps of the multiplier grow with the multiplier, so that
            without a bound it is infinite a few steps after it has become large."""

    def __init__(self, start: float, lr: float, limit: float, largest: float) -> None:
        self.value, self.lr, self.limit, self.largest = start, lr, limit, largest

    def update(self, mean_cost: float) -> None:
        """Raise the multiplier after a step whose cost was above the limit, and lower it after one below."""
        log = math.log(self.value) + self.lr * self.value * (mean_cost - self.limit)
        self.value = math.exp(max(log, _SMALLEST_LOG)) if log < math.log(self.largest) else self.largest

    def state_dict(self) -> dict[str, float]:
        """Return the value, for a checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint; a new bound holds at once."""
        self.value = min(state["value"], self.largest)
