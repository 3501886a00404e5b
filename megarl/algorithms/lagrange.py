"""Choose the factor of a constraint's cost in each step, from the mean cost of the steps before.

Plain floats: the driver runs this between two steps, in a process without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

MEAN_COST = "cost/mean"
"""The metric of `compute_advantages` to update with: the mean cost of the step's responses."""
_SMALLEST_LOG = -700.0
"""Logarithm of the smallest multiplier. A multiplier of 0 could never rise again."""


class LagrangeMultiplier:
    """The multiplier of a run, which moves by its own size (Safe RLHF, arXiv:2310.12773, eq. 31).

        ln lambda += lr lambda (mean cost - limit)

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

    def state_dict(self) -> dict[str, float | None]:
        """Return the numbers that a checkpoint holds."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Continue from a checkpoint; a new bound holds at once. A multiplier of 0, which only the other rule
        makes, could not rise by this one: it begins anew."""
        self.value = min(state["value"] or self.value, self.largest)


class PIDMultiplier(LagrangeMultiplier):
    """A multiplier that a PID controller moves (Stooke et al., arXiv:2007.03964, algorithm 2).

        excess   = mean cost - limit
        integral = integral + lr excess, between 0 and the bound
        lambda   = integral + kp excess + kd max(0, mean cost - that of the step before), between 0 and the bound

    With kp = kd = 0 this is the gradient ascent of PPO-Lagrangian (Ray et al., Benchmarking Safe Exploration, 2019).

    Args:
        start, lr, limit, largest: as above; `start` is also the first integral.
        kp, kd: gains of the excess and of its growth. They answer at once, where the integral only follows."""

    def __init__(self, start: float, lr: float, limit: float, largest: float, kp: float, kd: float) -> None:
        super().__init__(start, lr, limit, largest)
        self.kp, self.kd, self._integral = kp, kd, start
        self._last_cost: float | None = None

    def update(self, mean_cost: float) -> None:
        """Raise the multiplier after a step whose cost was above the limit or has grown, and lower it else."""
        excess = mean_cost - self.limit
        growth = 0.0 if self._last_cost is None else max(0.0, mean_cost - self._last_cost)
        self._integral = self._bounded(self._integral + self.lr * excess)
        self.value = self._bounded(self._integral + self.kp * excess + self.kd * growth)
        self._last_cost = mean_cost

    def state_dict(self) -> dict[str, float | None]:
        return {"value": self.value, "integral": self._integral, "last_cost": self._last_cost}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Continue from a checkpoint, also from one of the other rule, whose value becomes the integral."""
        self.value = self._bounded(state["value"])
        self._integral = self._bounded(state.get("integral", state["value"]))
        self._last_cost = state.get("last_cost")

    def _bounded(self, value: float) -> float:
        return min(max(value, 0.0), self.largest)


class LagrangeFlags(Protocol):
    """The fields of an algorithm that choose the rule of its multiplier."""

    cost_limit: float
    lagrange_init: float
    lagrange_lr: float
    lagrange_max: float
    lagrange_update: str
    lagrange_kp: float
    lagrange_kd: float


def build_multiplier(flags: LagrangeFlags) -> LagrangeMultiplier:
    """Return the multiplier of --lagrange-update."""
    common = (flags.lagrange_init, flags.lagrange_lr, flags.cost_limit, flags.lagrange_max)
    if flags.lagrange_update == "pid":
        return PIDMultiplier(*common, kp=flags.lagrange_kp, kd=flags.lagrange_kd)
    return LagrangeMultiplier(*common)


def multiplier_errors(flags: LagrangeFlags) -> Iterable[str]:
    """Yield an error for each flag of the multiplier that does not fit the others."""
    if flags.lagrange_init > flags.lagrange_max:
        yield (
            f"--lagrange-init ({flags.lagrange_init:g}): must be at most --lagrange-max "
            f"({flags.lagrange_max:g}). Try --lagrange-max {2 * flags.lagrange_init:g}."
        )
    for name in ("lagrange_kp", "lagrange_kd"):
        if getattr(flags, name) and flags.lagrange_update != "pid":
            flag = f"--{name.replace('_', '-')} ({getattr(flags, name):g})"
            yield f"{flag}: has no effect without --lagrange-update pid. Give both, or leave it out."
