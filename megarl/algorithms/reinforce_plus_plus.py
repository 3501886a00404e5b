"""REINFORCE++ (arXiv:2501.03262): the return of each token, whitened over all tokens of the step on all
ranks; no critic and no groups. Its baseline form takes the mean of the prompt's group off the reward first.

With the KL in the reward, the return of token t is the reward minus kl_coef times the KLs of the tokens from
t on. As in the paper: `--kl-mode reward --kl-estimator k1`; the baseline form has `--kl-mode loss
--kl-estimator k2`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megarl.algorithms.base import AdvantageInputs, ReferenceColumn, ReferenceInputs, advantage_metrics
from megarl.algorithms.policy_gradient import PolicyGradient
from megarl.algorithms.whitening import sums_for_whitening, whitened_reference

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ReinforcePlusPlus(PolicyGradient):
    """REINFORCE with advantages whitened over the step"""

    name: ClassVar[str] = "reinforce++"
    paper: ClassVar[str] = "2501.03262"
    advantage_formula: ClassVar[str] = "return of the token, whitened over the step"

    def compute_advantages(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the whitened return of each token, and metrics, with one sum over ranks.

        Metrics: advantage/max_abs, reward/failed, with a reference kl/per_response and kl/coef."""
        import torch

        from megarl.kernels.gae import gae, whiten

        kl, metrics = self._reference_kl(inputs)
        is_scored, lengths = inputs.spread(~inputs.rewards.isnan()), inputs.response_lengths
        ends, has_tokens = lengths.cumsum(0), lengths > 0
        token_rewards = -inputs.kl_coef * kl if self.kl_mode == "reward" else torch.zeros(len(is_scored))
        token_rewards[ends[has_tokens] - 1] += self._centred(inputs)[inputs.rows][has_tokens]
        cu_seqlens = torch.cat([ends.new_zeros(1), ends])
        # Without a critic, GAE with gamma and lambda 1 sums the rewards from each token on.
        sums = gae(
            token_rewards, torch.zeros_like(token_rewards), is_scored, cu_seqlens, gamma=1.0, gae_lambda=1.0
        )
        advantages = whiten(sums.advantages, is_scored, inputs.sum_over_ranks(sums.stats))
        return {"advantages": advantages}, metrics | advantage_metrics(inputs, advantages)

    def _centred(self, inputs: AdvantageInputs) -> Tensor:
        """Return the [S] rewards of the step's samples, less the baseline if there is one. Each goes to the
        sample's last token."""
        return inputs.rewards

    def _reference_reward(self, reward: float, group: Sequence[float]) -> float:
        """Return a sample's reward, less the baseline if there is one. `group`: the rewards of the sample's
        group that did not fail."""
        return reward

    def reference_sums(self, inputs: ReferenceInputs) -> list[float]:
        """Return sum, sum of squares and count of this rank's returns."""
        of_samples = (self._reference_returns(inputs, sample)[0] for sample in inputs.samples)
        return sums_for_whitening(value for returns in of_samples for value in returns)

    def reference_advantages(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn]:
        """Return one sample's whitened returns, added up from its last token."""
        returns, sizes = self._reference_returns(inputs, sample)
        if not returns:
            nothing = [0.0] * len(inputs.columns(sample, "advantages"))
            return {"advantages": ReferenceColumn(values=nothing, magnitudes=nothing)}
        return {"advantages": whitened_reference(returns, sizes, inputs.sums)}

    def _reference_returns(self, inputs: ReferenceInputs, sample: int) -> tuple[list[float], list[float]]:
        """Return one sample's returns and the sizes of their terms; two empty lists if its reward failed."""
        episode = inputs.episode(sample)
        rewards = [inputs.rewards[member] for member in inputs.groups[episode]]
        valid = [reward for reward in rewards if not math.isnan(reward)]
        if math.isnan(inputs.rewards[episode]):
            return [], []
        num_tokens = len(inputs.columns(sample, "advantages"))
        costs = sizes = [0.0] * num_tokens
        if self.kl_mode == "reward":
            costs, sizes = (part.tolist() for part in self._reference_kl_costs(inputs, [sample]))
        reward = self._reference_reward(inputs.rewards[episode], valid)
        size = 2 * max(map(abs, valid))
        tokens = range(num_tokens)
        return [reward - math.fsum(costs[t:]) for t in tokens], [size + math.fsum(sizes[t:]) for t in tokens]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReinforcePlusPlusBaseline(ReinforcePlusPlus):
    """REINFORCE++ with the group's mean as baseline"""

    name: ClassVar[str] = "reinforce++-baseline"
    advantage_formula: ClassVar[str] = "as reinforce++, of r - group mean"
    relative_to_group: ClassVar[bool] = True

    def _centred(self, inputs: AdvantageInputs) -> Tensor:
        from megarl.kernels.group_advantages import group_advantages

        return group_advantages(inputs.rewards, inputs.group_ids, normalize_by_std=False)

    def _reference_reward(self, reward: float, group: Sequence[float]) -> float:
        return reward - sum(group) / len(group)
