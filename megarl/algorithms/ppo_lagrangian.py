"""PPO-Lagrangian, the reinforcement learning of Safe RLHF (arXiv:2310.12773): raise the reward while the mean
cost of a response stays below a limit.

    A = (A_reward - lambda A_cost) / (1 + lambda)            ln lambda += lagrange_lr lambda (mean cost - cost_limit)

A_reward and A_cost are PPO's advantages of two critics, which learn the returns of rewards and of costs; A is
whitened as PPO's. The cost is a score that the reward function returns by name; its weight in the reward must
be 0. After each step the driver moves the multiplier lambda by the mean cost of the step.

Not as in the paper: a KL in the reward (--kl-mode reward) is taken off the reward alone, not half of it added
to the cost, and there is no pretraining term.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar

from megarl.algorithms.base import AdvantageInputs, ReferenceColumn, ReferenceInputs, advantage_metrics
from megarl.algorithms.lagrange import MEAN_COST, LagrangeMultiplier
from megarl.algorithms.ppo import PPO
from megarl.algorithms.several_scores import StepScores
from megarl.algorithms.whitening import whitened_reference
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
    """How fast the multiplier follows the cost: its logarithm moves by this times the multiplier times what
    the mean cost of the step is above --cost-limit."""
    lagrange_max: Positive | None = None
    """Bound of the multiplier. Default: none."""

    def build_multiplier(self) -> LagrangeMultiplier:
        return LagrangeMultiplier(self.lagrange_init, self.lagrange_lr, self.cost_limit, self.lagrange_max)

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

        Metrics: those of PPO; cost/mean and cost/multiplier; cost_critic/value_mean, cost_critic/return_mean
        and cost_critic/explained_variance."""
        import torch

        from megarl.kernels.gae import whiten

        costs = torch.tensor(self._costs(inputs.scores), dtype=torch.float32)
        of_reward, metrics = self._part().compute_advantages(inputs)
        cost_inputs = replace(inputs, rewards=costs, values=inputs.cost_values)
        of_cost, cost_metrics = self._part(**_NO_KL).compute_advantages(cost_inputs)
        assert inputs.scores is not None
        factor = inputs.scores.multiplier
        advantages = (of_reward["advantages"] - factor * of_cost["advantages"]) / (1 + factor)
        if self.whiten_advantages:
            is_scored = inputs.spread(~inputs.rewards.isnan())
            exact = advantages[is_scored].double()
            parts = [exact.sum(), exact.square().sum(), exact.new_tensor(float(len(exact)))]
            advantages = whiten(advantages, is_scored, inputs.sum_over_ranks(torch.stack(parts)))
        critic = {f"cost_{name}": v for name, v in cost_metrics.items() if name.startswith("critic/")}
        here = costs[inputs.counted_rows].double().nansum().item()
        metrics |= critic | {
            MEAN_COST: here / max(inputs.num_scored, 1),
            "cost/multiplier": factor * len(inputs.counted_rows) / inputs.num_trained,
        }
        columns = {"advantages": advantages, "returns": of_reward["returns"]}
        columns["cost_returns"] = of_cost["returns"]
        return columns, metrics | advantage_metrics(inputs, advantages)

    def _costs(self, scores: StepScores | None) -> list[float]:
        """Return the cost of each sample of the step; NaN where its reward failed.

        Raises: ValueError if the reward function returns no score of that name."""
        if scores is None or self.cost_score not in scores.of:
            known = ", ".join(scores.of) if scores else "none"
            raise ValueError(
                f"--cost-score ({self.cost_score}): the scores of the reward are {known}. Let --reward-function return "
                f"{{'scores': {{..., '{self.cost_score}': ...}}}}, or name another."
            )
        return list(scores.of[self.cost_score])

    def reference_sums(self, inputs: ReferenceInputs) -> list[float] | None:
        if not self.whiten_advantages:
            return None
        scored = [one for one in inputs.samples if not math.isnan(inputs.rewards[inputs.episode(one)])]
        found = [v for sample in scored for v in self._references(inputs, sample)["advantages"].values]
        return [math.fsum(found), math.fsum(value * value for value in found), float(len(found))]

    def reference_advantages(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn]:
        """Return advantages and both returns of one sample, computed a token at a time from its end."""
        found = self._references(inputs, sample)
        if self.whiten_advantages and not math.isnan(inputs.rewards[inputs.episode(sample)]):
            mixed = found["advantages"]
            found["advantages"] = whitened_reference(mixed.values, mixed.magnitudes, inputs.sums)
        return found

    def _references(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn]:
        """Return the columns of one sample before whitening."""
        costs = dict(zip(inputs.rewards, self._costs(inputs.scores), strict=True))
        of_costs = replace(
            inputs, rewards=costs, columns=lambda one, name: inputs.columns(one, _OF_COST.get(name, name))
        )
        found = self._part().reference_advantages(inputs, sample)
        of_cost = self._part(**_NO_KL).reference_advantages(of_costs, sample)
        assert inputs.scores is not None
        factor = inputs.scores.multiplier

        def mixed(name: str, sign: float) -> list[float]:
            pairs = zip(getattr(found["advantages"], name), getattr(of_cost["advantages"], name), strict=True)
            return [(one + sign * factor * other) / (1 + factor) for one, other in pairs]

        advantages = ReferenceColumn(values=mixed("values", -1), magnitudes=mixed("magnitudes", 1))
        return found | {"advantages": advantages, "cost_returns": of_cost["returns"]}
