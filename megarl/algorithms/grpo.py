"""Group Relative Policy Optimization (arXiv:2402.03300): PPO's clipped loss, and no critic: a reward is judged within its prompt's group.

Not as in the paper, which is `--loss-aggregation seq-mean-token-mean --kl-mode loss --kl-coef 0.04`: token-mean and no KL by default.
Dr. GRPO (2503.20783) is `--loss-aggregation dr-grpo --no-normalize-advantages-by-std`, DAPO's clip (2503.14476) `--clip-eps-high 0.28`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.algorithms.base import AdvantageInputs, advantage_metrics
from megarl.algorithms.clipped_policy import ClippedPolicy

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPO(ClippedPolicy):
    """group relative policy optimization"""

    normalize_advantages_by_std: bool = True
    """Divide the advantages by the standard deviation of their group's rewards."""

    def compute_advantages(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Each sample's advantage in its group, on all its tokens. With kl_mode reward one sum over ranks, else none.

        Metrics: advantage/max_abs, reward/failed, with a reference kl/per_response and kl/coef.
        """
        from megarl.kernels.group_advantages import group_advantages

        kl, metrics = self._reference_kl(inputs)
        rewards = inputs.rewards
        if self.kl_mode == "reward":
            rewards = rewards - (inputs.kl_coef * inputs.sum_per_sample(kl)).to(rewards.dtype)
        advantages = inputs.spread(
            group_advantages(rewards, inputs.group_ids, self.normalize_advantages_by_std)
        )
        return {"advantages": advantages}, metrics | advantage_metrics(inputs, advantages)
