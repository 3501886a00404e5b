"""Choose the factor of a constraint's cost in each step (Safe RLHF, arXiv:2310.12773, eq. 31).

    ln lambda += lr lambda (mean cost - limit)

Plain floats: the driver runs this between two steps, in a process without torch."""

from __future__ import annotations

import math

MEAN_COST = "cost/mean"
"""The metric of `compute_advantages` to update with: the mean cost of the step's responses."""


class LagrangeMultiplier:
    """The multiplier of a run.

    Args:
        start: value of the first step, above 0.
        lr: how fast it follows; 0 keeps it.
        limit: the mean cost of a response that is allowed.
        largest: bound of the value; None is none."""

    def __init__(self, start: float, lr: float, limit: float, largest: float | None) -> None:
        self.value, self.lr, self.limit, self.largest = start, lr, limit, largest

    def update(self, mean_cost: float) -> None:
        """Raise the multiplier after a step whose cost was above the limit, and lower it after one below.

        Raises: ValueError for a multiplier that is no finite number any more."""
        before = self.value
        try:
            self.value *= math.exp(self.lr * self.value * (mean_cost - self.limit))
        except OverflowError:
            self.value = math.inf
        if self.largest is not None:
            self.value = min(self.value, self.largest)
        if not math.isfinite(self.value):
            raise ValueError(
                f"--lagrange-lr ({self.lr:g}): a mean cost of {mean_cost:g}, with --cost-limit {self.limit:g}, moves "
                f"the multiplier from {before:g} beyond all numbers. Lower it, or try --lagrange-max 10."
            )

    def state_dict(self) -> dict[str, float]:
        """Return the value, for a checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint; a new bound holds at once."""
        self.value = min(state["value"], math.inf if self.largest is None else self.largest)
