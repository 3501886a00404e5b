"""Group Relative Policy Optimization (arXiv:2402.03300): PPO's clipped loss, and no critic: a reward is
judged within its prompt's group.

Not as in the paper, which is `--loss-aggregation seq-mean-token-mean --kl-mode loss --kl-coef 0.04`:
token-mean and no KL by default. Dr. GRPO (2503.20783) is `--loss-aggregation dr-grpo
--no-normalize-advantages-by-std`, DAPO's clip (2503.14476) `--clip-eps-high 0.28`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megarl.algorithms.base import AdvantageInputs, ReferenceColumn, ReferenceInputs, advantage_metrics
from megarl.algorithms.group_advantage import GroupAdvantage, Peer, normalized_in_group
from megarl.algorithms.reference_kl import reference_kl
from megarl.algorithms.turn_advantages import reference_turn_advantages, turn_advantages
from megarl.algorithms.user_advantage import load_user_advantage
from megarl.config.errors import FieldRules

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPO(GroupAdvantage):
    """group relative policy optimization"""

    paper: ClassVar[str] = "2402.03300"
    advantage_formula: ClassVar[str] = "(r - group mean) / (group std + 1e-4)"

    normalize_advantages_by_std: bool = True
    """Divide the advantages by the standard deviation of their group's rewards."""
    advantage: str | None = None
    """path/to/file.py:function of your own that makes the advantages of a step's samples from their rewards,
    groups and lengths, in place of the group's mean and deviation. Default: none."""

    def field_rules(self) -> FieldRules:
        yield from GroupAdvantage.field_rules(self)
        if self.advantage is None:
            return
        try:
            load_user_advantage(self.advantage)
        except ValueError as error:
            yield False, "advantage", str(error)
        yield (
            self.normalize_advantages_by_std,
            "normalize_advantages_by_std",
            "is not for --advantage, whose function decides. Leave it out.",
        )

    @property
    def takes_turn_rewards(self) -> bool:
        """Whether the algorithm can give each answer of an episode an advantage of its own
        (--turn-rewards)."""
        return self.advantage is None

    def compute_advantages(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return one advantage per response as the base class does, or with --turn-rewards one per answer."""
        if inputs.turns is None:
            return GroupAdvantage.compute_advantages(self, inputs)
        _, metrics = reference_kl(self, inputs)
        advantages = turn_advantages(inputs, self.normalize_advantages_by_std)
        return {"advantages": advantages}, metrics | advantage_metrics(inputs, advantages)

    def reference_advantages(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn] | None:
        if self.advantage is not None:
            return None  # the user's function is the only definition
        if inputs.turns is None:
            return GroupAdvantage.reference_advantages(self, inputs, sample)
        return reference_turn_advantages(inputs, sample, self.normalize_advantages_by_std)

    def sample_advantages(self, rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
        if self.advantage is not None:
            return load_user_advantage(self.advantage)(rewards, group_ids, lengths)
        from megarl.kernels.group_advantages import group_advantages

        return group_advantages(rewards, group_ids, self.normalize_advantages_by_std)

    def reference_advantage(self, mine: Peer, group: Sequence[Peer]) -> tuple[float, float]:
        """Return (reward - mean of its group) / (standard deviation + 1e-4)."""
        rewards = [peer.reward for peer in group]
        return normalized_in_group(mine.reward, rewards, self.normalize_advantages_by_std)
