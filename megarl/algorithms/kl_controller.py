"""Choose the KL coefficient of each step: fixed, or following a target KL (Ziegler et al., arXiv:1909.08593,
section 2.2).

    error = clip(measured_kl / target - 1, -0.2, 0.2)        coef *= 1 + error * num_samples / horizon

The paper writes 0.1 for num_samples / horizon; its code, which this follows, lets the factor move at one
speed per sample, whatever the number of samples per step. Plain floats: these run where the metrics are, in a
process without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from megarl.config.errors import FieldRules

MEASURED_KL = "kl/per_response"
"""The metric of `compute_advantages` to update with: the mean over the step's samples of the KL summed over a
response, in nats."""

MAX_ERROR = 0.2


class FixedKLController:
    def __init__(self, coef: float) -> None:
        self.coef = coef
        """KL coefficient of the next step."""

    def update(self, measured_kl: float, num_samples: int) -> None:
        """Do nothing, because the coefficient is fixed. A subclass may change the coefficient, given that
        `num_samples` responses had a mean KL of `measured_kl` nats each."""

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint holds: nothing, because the --kl-coef of the next job counts."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Do nothing: the --kl-coef of the new job counts, not that of the checkpoint."""


class AdaptiveKLController(FixedKLController):
    def __init__(self, coef: float, target: float, horizon: int) -> None:
        """Start at `coef`, which `update` moves so that the KL of a response comes to `target`.

        Args:
            coef: where it starts, > 0.
            target: nats per response, > 0.
            horizon: samples until `coef` has changed by about the relative error of the KL.
        """
        super().__init__(coef)
        self.target, self.horizon = target, horizon

    def update(self, measured_kl: float, num_samples: int) -> None:
        """Move the coefficient towards the target KL. Raises: ValueError for a KL that is not finite, or for
        so many samples that the factor could reach 0."""
        if not math.isfinite(measured_kl):
            raise ValueError(
                f"measured_kl ({measured_kl}) must be finite: the log-probs of the policy or of the "
                "reference are not"
            )
        if MAX_ERROR * num_samples >= self.horizon:
            raise ValueError(
                f"kl_horizon ({self.horizon}) must be above {MAX_ERROR} x samples per step ({num_samples}), "
                f"or the KL's factor may fall to 0 at once. Try {10 * num_samples}."
            )
        error = min(max(measured_kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        self.coef *= 1 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with the coefficient of a checkpoint, if it has one.

        A run with a fixed coefficient stores none, and before it stored 0 without a KL, which could never
        move."""
        self.coef = state.get("coef") or self.coef


class KLFlags(Protocol):
    """The fields of an algorithm that choose its KL to the reference, and the factor of the KL."""

    kl_mode: str
    kl_coef: float
    kl_straight_through: bool
    kl_controller: str
    kl_target: float
    kl_horizon: int


def kl_rules(flags: KLFlags) -> FieldRules:
    """Return the rules between the flags of the KL."""
    is_none = flags.kl_mode == "none"
    coef_rule = f"must be above 0 with --kl-mode {flags.kl_mode}. Try 0.001."
    if is_none:
        coef_rule = "must be 0 with --kl-mode none. Leave it out, or try --kl-mode loss."
    yield is_none == (flags.kl_coef == 0), "kl_coef", coef_rule
    has_term = not flags.kl_straight_through or flags.kl_mode == "loss"
    yield has_term, "kl_straight_through", "needs --kl-mode loss. Leave it out."
    is_fixed = flags.kl_controller != "adaptive" or not is_none
    yield is_fixed, "kl_controller", "needs --kl-mode loss or reward. Leave it out."


def build_kl_controller(flags: KLFlags) -> FixedKLController:
    """Return the controller of --kl-controller."""
    if flags.kl_controller == "adaptive":
        return AdaptiveKLController(flags.kl_coef, flags.kl_target, flags.kl_horizon)
    return FixedKLController(flags.kl_coef)


def horizon_errors(flags: KLFlags, num_samples: int) -> Iterable[str]:
    """Yield the error of a --kl-horizon that is too short for steps of `num_samples` samples."""
    if flags.kl_controller == "adaptive" and MAX_ERROR * num_samples >= flags.kl_horizon:
        yield (
            f"--kl-horizon ({flags.kl_horizon}): must be above {MAX_ERROR} x the samples of a step "
            f"({num_samples}), or the KL's factor may fall to 0 at once. Try {10 * num_samples}."
        )
