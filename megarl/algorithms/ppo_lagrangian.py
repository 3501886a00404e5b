"""PPO-Lagrangian, the reinforcement learning of Safe RLHF (arXiv:2310.12773): raise the reward while the mean
cost of a response stays below a limit.

    A = (A_reward - lambda A_cost) / (1 + lambda)

A_reward and A_cost are PPO's advantages of two critics, which learn the returns of rewards and of costs; A is
whitened as PPO's. The cost is a score that the reward function returns by name; its weight in the reward must
be 0. After each step the driver moves the multiplier lambda by the mean cost of the step (lagrange.py).

Not as in the paper: a KL in the reward (--kl-mode reward) is taken off the reward alone, not half of it added
to the cost, and there is no pretraining term.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from megarl.algorithms.base import AdvantageInputs, ReferenceColumn, ReferenceInputs, advantage_metrics
from megarl.algorithms.lagrange import MEAN_COST, LagrangeMultiplier, PIDMultiplier
from megarl.algorithms.ppo import PPO
from megarl.algorithms.whitening import sums_for_whitening, whitened, whitened_reference
from megarl.config.errors import NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor

_NO_KL = {"kl_mode": "none", "kl_coef": 0.0, "kl_controller": "fixed", "kl_straight_through": False}
"""Costs have no KL taken off them."""
_OF_COST = {"values": "cost_values", "returns": "cost_returns"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOLagrangian(PPO):
    """PPO that holds a cost below a limit, with a critic of the costs"""

    name: ClassVar[str] = "ppo-lagrangian"
    paper: ClassVar[str] = "2310.12773"
    advantage_formula: ClassVar[str] = "(GAE of rewards - lambda GAE of costs) / (1 + lambda), whitened"
    takes_scores: ClassVar[bool] = True
    needs_cost_critic: ClassVar[bool] = True

    cost_score: str = "cost"
    """Name of the score that is the cost, of those that --reward-function returns."""
    cost_limit: float = 0.0
    """Mean cost of a response that is allowed."""
    lagrange_init: Positive = 1.0
    """Multiplier of the cost in the first step."""
    lagrange_lr: NonNegative = 0.1
    """Speed at which the multiplier follows the cost: what the cost of a step above --cost-limit is multiplied with."""
    lagrange_max: Positive = 5.0
    """Bound of the multiplier, at least --lagrange-init."""
    lagrange_update: Literal["exponential", "pid"] = "exponential"
    """How the multiplier follows the cost.

    exponential: its logarithm moves by --lagrange-lr times the multiplier times what the cost is above the limit.
    pid: the sum of an integral, which moves by --lagrange-lr times what the cost is above the limit, of this excess
        times --lagrange-kp, and of the growth of the cost times --lagrange-kd."""
    lagrange_kp: NonNegative = 0.0
    """Gain of what the mean cost of a step is above --cost-limit. With --lagrange-update pid."""
    lagrange_kd: NonNegative = 0.0
    """Gain of the growth of the mean cost from one step to the next. With --lagrange-update pid."""

    def step_errors(self, num_samples: int) -> Iterable[str]:
        yield from PPO.step_errors(self, num_samples)
        if self.lagrange_init > self.lagrange_max:
            yield (
                f"--lagrange-init ({self.lagrange_init:g}): must be at most --lagrange-max "
                f"({self.lagrange_max:g}). Try --lagrange-max {2 * self.lagrange_init:g}."
            )
        for name in ("lagrange_kp", "lagrange_kd"):
            if getattr(self, name) and self.lagrange_update != "pid":
                flag = f"--{name.replace('_', '-')} ({getattr(self, name):g})"
                yield f"{flag}: has no effect without --lagrange-update pid. Give both, or leave it out."

    def build_multiplier(self) -> LagrangeMultiplier:
        common = (self.lagrange_init, self.lagrange_lr, self.cost_limit, self.lagrange_max)
        if self.lagrange_update == "pid":
            return PIDMultiplier(*common, kp=self.lagrange_kp, kd=self.lagrange_kd)
        return LagrangeMultiplier(*common)

    @property
    def advantage_reads(self) -> tuple[str, ...]:
        return (*self._part().advantage_reads, "cost_values")

    @property
    def advantage_writes(self) -> tuple[str, ...]:
        return (*self._part().advantage_writes, "cost_returns")

    def _part(self, **changes: object) -> PPO:
        """Return PPO with this algorithm's flags and without whitening, which sees rewards or costs alone."""
        flags = {field.name: getattr(self, field.name) for field in fields(PPO)}
        return PPO(**flags | {"whiten_advantages": False} | changes)

    def compute_advantages(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the columns advantages, returns and cost_returns, and this rank's part of the metrics, with
        up to three sums over ranks.

        Metrics: those of PPO; cost/multiplier, and cost/mean if a response has a reward;
        cost_critic/value_mean, cost_critic/return_mean and cost_critic/explained_variance."""
        import torch

        assert inputs.scores is not None
        factor, here = inputs.scores.multiplier, inputs.counted_rows
        costs = torch.tensor(inputs.scores.required(self.cost_score, "--cost-score"), dtype=torch.float32)
        of_reward, metrics = self._part().compute_advantages(inputs)
        as_rewards = replace(inputs, rewards=costs, values=inputs.cost_values)
        of_cost, cost_metrics = self._part(**_NO_KL).compute_advantages(as_rewards)
        advantages = (of_reward["advantages"] - factor * of_cost["advantages"]) / (1 + factor)
        if self.whiten_advantages:
            advantages = whitened(inputs, advantages)
        metrics |= {f"cost_{name}": v for name, v in cost_metrics.items() if name.startswith("critic/")}
        metrics["cost/multiplier"] = factor * len(here) / inputs.num_trained
        if inputs.num_scored:
            metrics[MEAN_COST] = costs[here].double().nansum().item() / inputs.num_scored
        columns = of_reward | {"advantages": advantages, "cost_returns": of_cost["returns"]}
        return columns, metrics | advantage_metrics(inputs, advantages)

    def reference_sums(self, inputs: ReferenceInputs) -> list[float] | None:
        if not self.whiten_advantages:
            return None
        scored = [one for one in inputs.samples if not math.isnan(inputs.rewards[inputs.episode(one)])]
        of_samples = (self._references(inputs, one)["advantages"].values for one in scored)
        return sums_for_whitening(value for values in of_samples for value in values)

    def reference_advantages(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn]:
        """Return advantages and both returns of one sample, computed a token at a time from its end."""
        found = self._references(inputs, sample)
        if self.whiten_advantages and not math.isnan(inputs.rewards[inputs.episode(sample)]):
            mixed = found["advantages"]
            found["advantages"] = whitened_reference(mixed.values, mixed.magnitudes, inputs.sums)
        return found

    def _references(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn]:
        """Return the columns of one sample before whitening."""
        assert inputs.scores is not None
        factor, episode = inputs.scores.multiplier, inputs.episode(sample)
        cost = inputs.scores.of[self.cost_score][inputs.positions[episode]]
        columns = lambda one, name: inputs.columns(one, _OF_COST.get(name, name))
        as_rewards = replace(inputs, rewards={episode: cost}, columns=columns)
        found = self._part().reference_advantages(inputs, sample)
        of_cost = self._part(**_NO_KL).reference_advantages(as_rewards, sample)
        mixed = found["advantages"].plus(of_cost["advantages"], -factor).times(1 / (1 + factor))
        return found | {"advantages": mixed, "cost_returns": of_cost["returns"]}
