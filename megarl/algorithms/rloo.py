"""REINFORCE leave-one-out (arXiv:2402.14740): the baseline of a response is the mean reward of the prompt's
other responses.

As in the paper: `--policy-loss reinforce --kl-mode reward --kl-estimator k1 --kl-coef 0.03 --loss-aggregation
seq-mean-token-sum`, one update per step. Not as in the paper by default: PPO's clipped ratio, token-mean and
no KL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megarl.algorithms.group_advantage import GroupAdvantage, GroupStatistics, Peer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RLOO(GroupAdvantage):
    """REINFORCE leave-one-out"""

    paper: ClassVar[str] = "2402.14740"
    advantage_formula: ClassVar[str] = "r - mean reward of the group's other responses"

    def sample_advantages(self, rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
        found = GroupStatistics.of(rewards, group_ids)
        others = (found.total(found.rewards) - found.rewards) / (found.count - 1).clamp(min=1)
        has_baseline = found.is_valid & (found.count > 1)
        return (found.rewards - others).where(has_baseline, 0.0).float()

    def reference_advantage(self, mine: Peer, group: Sequence[Peer]) -> tuple[float, float]:
        """Return the reward minus the mean reward of the group's other responses."""
        total = sum(peer.reward for peer in group)
        return mine.reward - (total - mine.reward) / (len(group) - 1), (len(group) - 1) / len(group)
