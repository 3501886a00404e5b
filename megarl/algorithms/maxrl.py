"""Maximum likelihood reinforcement learning (arXiv:2602.02710): the group's mean reward divides the
advantage, so that a prompt is weighted by the inverse of its pass rate, as in the gradient of the log of the
pass rate.

As in the paper: rewards of 0 and 1, `--policy-loss reinforce`, one update per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megarl.algorithms.group_advantage import GroupAdvantage, GroupStatistics, Peer

if TYPE_CHECKING:
    from torch import Tensor


_ROUNDING = 2.0**-23
"""Smallest ratio of a group's mean to the mean size of its rewards that counts as above 0.

In fp32 rewards of mean 0 can have a smaller one, which would divide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxRL(GroupAdvantage):
    """maximum likelihood reinforcement learning"""

    paper: ClassVar[str] = "2602.02710"
    advantage_formula: ClassVar[str] = "(r - group mean) / group mean, 0 where the mean is not above 0"

    def sample_advantages(self, rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
        found = GroupStatistics.of(rewards, group_ids)
        mean, size = (
            found.total(of) / found.count.clamp(min=1) for of in (found.rewards, found.rewards.abs())
        )
        has_mean = found.is_valid & (found.count > 1) & (mean > _ROUNDING * size)
        return ((found.rewards - mean) / mean.where(has_mean, 1.0)).where(has_mean, 0.0).float()

    def reference_advantage(self, mine: Peer, group: Sequence[Peer]) -> tuple[float, float]:
        """Return (reward - mean of its group) / mean, or 0 where the mean is not above 0."""
        mean, size = (
            sum(of) / len(group) for of in zip(*((peer.reward, abs(peer.reward)) for peer in group))
        )
        return ((mine.reward - mean) / mean, mean) if mean > _ROUNDING * size else (0.0, 1.0)
