"""Warn of a step that has damaged the model: its loss, entropy, KL or gradient norm jumps up.

A value is compared with the run's own last steps, on the scale y = log(value + floor):

    jump:  y - median(y of the last WINDOW steps) > max(log(RISE), DEVIATIONS x 1.4826 x MAD)

MAD is the median distance of those y from their median, so a metric that varies much must jump further. The
floor is the size below which changes of a metric do not matter. docs/debugging.md has the rule for users."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping

WINDOW = 16
"""Number of earlier steps that a value is compared with."""
RISE = 4.5
"""Smallest factor between value + floor and its recent median that counts as a jump."""
DEVIATIONS = 6.0
"""Standard deviations above the median, estimated from the MAD, that a jump exceeds as well."""
NATS_FLOOR = 0.1
"""Floor of losses and entropies, which are in nats per token."""
KL_FLOOR = 0.05
"""Floor of policy/kl, how far the updates of one step move the policy, in nats per token."""
_SIGMA_PER_MAD = 1.4826  # of a normal distribution
_NO_CLIP_FLOOR = 1.0  # of gradient norms without --clip-grad: its default


class JumpWatch:
    """Compares each step of one actor with the steps before it, and words one warning per incident.

    An incident ends after WINDOW steps without a jump. Its values are left out of the comparison.

    Args:
        needs_rollout: False for supervised fine-tuning, whose loss is a cross-entropy. The loss of a policy
            gradient is about 0 and says nothing.
        clip_grad: role of a metric (policy, critic, cost_critic) -> --clip-grad of its optimizer, the floor of its
            gradient norms.
        suffix: suffix of the actor's metrics ("", "_2"), for the message."""

    def __init__(self, needs_rollout: bool, clip_grad: Mapping[str, float], suffix: str = "") -> None:
        self._floors = {} if needs_rollout else {"policy/loss": NATS_FLOOR}
        self._floors |= {"policy/entropy": NATS_FLOOR, "policy/kl": KL_FLOOR}
        for role, clip in clip_grad.items():
            self._floors[f"{role}/grad_norm"] = clip if clip > 0 else _NO_CLIP_FLOOR
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in self._floors}
        self._recent["policy/kl"].append(0.0)  # a step's first update starts from the policy that sampled
        self._calm_steps, self._num_steps = WINDOW, 0
        self._suffix = suffix
        self.steps: list[int] = []
        """Steps of the warnings."""

    def note(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Add a step's metrics. Returns the warning at the first jump of an incident, else None."""
        jumps = []
        for name, recent in self._recent.items():
            value = metrics.get(name, math.nan)
            if not (math.isfinite(value) and value >= 0.0):
                continue
            if self._jumps(value, recent, self._floors[name]):
                before = f"{statistics.median(recent):.3g} (median of the steps before)"
                if name == "policy/kl" and self._num_steps == 0:
                    before = "0 (before the first update)"
                jumps.append(f"{self._named(name)} jumped from {before} to {value:.3g}")
            else:
                recent.append(value)
        self._num_steps += 1
        begins = bool(jumps) and self._calm_steps >= WINDOW
        self._calm_steps = 0 if jumps else self._calm_steps + 1
        if not begins:
            return None
        self.steps.append(step)
        return (
            f"step {step}: {'; '.join(jumps)}. The last updates may have destroyed the model. Try a lower "
            "--lr or --clip-grad (docs/debugging.md, section A metric jumps)."
        )

    @staticmethod
    def _jumps(value: float, recent: deque[float], floor: float) -> bool:
        if not recent:
            return False
        logs = [math.log(earlier + floor) for earlier in recent]
        middle = statistics.median(logs)
        mad = statistics.median(abs(y - middle) for y in logs)
        limit = max(math.log(RISE), DEVIATIONS * _SIGMA_PER_MAD * mad)
        return math.log(value + floor) - middle > limit

    def _named(self, name: str) -> str:
        role, _, metric = name.partition("/")
        return f"{role}{self._suffix}/{metric}"
