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

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal

from megarl.algorithms.base import AdvantageInputs, ReferenceColumn, ReferenceInputs, advantage_metrics
from megarl.algorithms.costs import NO_KL, cost_metrics, costs_as_rewards, references_of_costs
from megarl.algorithms.lagrange import LagrangeMultiplier, build_multiplier, multiplier_errors
from megarl.algorithms.ppo import PPO
from megarl.algorithms.whitening import reference_sums, whitened, whitened_columns
from megarl.config.errors import NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor


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
        return [*PPO.step_errors(self, num_samples), *multiplier_errors(self)]

    def build_multiplier(self) -> LagrangeMultiplier:
        return build_multiplier(self)

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
        factor, costs = inputs.scores.multiplier, costs_as_rewards(inputs, self.cost_score)
        of_reward, metrics = self._part().compute_advantages(inputs)
        of_cost, of_critic = self._part(**NO_KL).compute_advantages(costs)
        advantages = (of_reward["advantages"] - factor * of_cost["advantages"]) / (1 + factor)
        if self.whiten_advantages:
            advantages = whitened(inputs, advantages)
        metrics |= cost_metrics(inputs, costs.rewards, of_critic) | advantage_metrics(inputs, advantages)
        return of_reward | {"advantages": advantages, "cost_returns": of_cost["returns"]}, metrics

    def reference_sums(self, inputs: ReferenceInputs) -> list[float] | None:
        return reference_sums(inputs, self._references) if self.whiten_advantages else None

    def reference_advantages(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn]:
        """Return advantages and both returns of one sample, computed a token at a time from its end."""
        found = self._references(inputs, sample)
        return whitened_columns(inputs, sample, found) if self.whiten_advantages else found

    def _references(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn]:
        """Return the columns of one sample before whitening."""
        factor, costs = inputs.scores.multiplier, references_of_costs(inputs, sample, self.cost_score)
        found = self._part().reference_advantages(inputs, sample)
        of_cost = self._part(**NO_KL).reference_advantages(costs, sample)
        mixed = found["advantages"].plus(of_cost["advantages"], -factor).times(1 / (1 + factor))
        return found | {"advantages": mixed, "cost_returns": of_cost["returns"]}
