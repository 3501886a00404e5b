"""REINFORCE++ (arXiv:2501.03262): the return of each token, whitened over all tokens of the step on all
ranks; no critic and no groups. Its baseline form takes the mean of the prompt's group off the reward first.

With the KL in the reward, the return of token t is the reward minus kl_coef times the KLs of the tokens from
t on. As in the paper: `--kl-mode reward --kl-estimator k1`; the baseline form has `--kl-mode loss
--kl-estimator k2`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from megarl.algorithms.base import AdvantageInputs, ReferenceColumn, ReferenceInputs, advantage_metrics
from megarl.algorithms.gae import reference_gae, step_gae, token_rewards
from megarl.algorithms.policy_gradient import PolicyGradient
from megarl.algorithms.whitening import reference_sums, whitened_columns

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

        from megarl.kernels.gae import whiten

        rewards, metrics = token_rewards(self, inputs, self._centred(inputs))
        # Without a critic, GAE with gamma and lambda 1 sums the rewards from each token on.
        returns = step_gae(inputs, rewards, torch.zeros_like(rewards), gamma=1.0, gae_lambda=1.0)
        is_scored = inputs.spread(~inputs.rewards.isnan())
        advantages = whiten(returns.advantages, is_scored, inputs.sum_over_ranks(returns.stats))
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
        return reference_sums(inputs, self._references)

    def reference_advantages(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn]:
        """Return one sample's whitened returns, added up from its last token."""
        return whitened_columns(inputs, sample, self._references(inputs, sample))

    def _references(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn]:
        """Return one sample's returns before whitening."""
        num_tokens, episode = len(inputs.columns(sample, "advantages")), inputs.episode(sample)
        if not inputs.has_reward(sample):
            return {"advantages": ReferenceColumn.constant(num_tokens)}
        group = [inputs.rewards[member] for member in inputs.groups[episode]]
        valid = [reward for reward in group if not math.isnan(reward)]
        reward, values = self._reference_reward(inputs.rewards[episode], valid), [0.0] * num_tokens
        returns = reference_gae(self, inputs, sample, reward, values, gamma=1.0, gae_lambda=1.0)
        size = 2 * max(map(abs, valid))  # of the reward, from which the baseline may take nearly all
        return {"advantages": replace(returns, magnitudes=[size + one for one in returns.magnitudes])}


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
