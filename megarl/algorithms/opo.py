"""On-policy optimization with the optimal reward baseline (arXiv:2505.23585): the baseline is the group's
mean reward weighted by response length, which has the smallest variance if a gradient's size grows with the
length.

As in the paper: `--policy-loss reinforce` and one update per step, without staleness: it is meant for exact
on-policy training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megarl.algorithms.group_advantage import GroupAdvantage, GroupStatistics, Peer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class OPO(GroupAdvantage):
    """on-policy optimization with the optimal baseline"""

    paper: ClassVar[str] = "2505.23585"
    advantage_formula: ClassVar[str] = "r - length-weighted group mean"
    is_on_policy: ClassVar[bool] = True

    def sample_advantages(self, rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
        found = GroupStatistics.of(rewards, group_ids)
        weights = lengths * found.is_valid
        baseline = found.total(weights * found.rewards) / found.total(weights).clamp(min=1)
        has_baseline = found.is_valid & (found.count > 1)
        return (found.rewards - baseline).where(has_baseline, 0.0).float()

    def reference_advantage(self, mine: Peer, group: Sequence[Peer]) -> tuple[float, float]:
        """Return the reward minus the mean reward of all tokens of the group."""
        tokens = sum(peer.length for peer in group)
        return mine.reward - sum(peer.length * peer.reward for peer in group) / tokens, 1.0
