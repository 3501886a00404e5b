"""ReMax (arXiv:2310.10505): the baseline of a response is the reward of the greedy answer to the same prompt.

    A(y) = r(y) - r(greedy answer)

The greedy answer is one more response per prompt. It is scored, and neither trained on nor compared with the
trainer's log-probs, as it is drawn at another temperature. If its reward failed, the prompt has no baseline,
and its responses are left out of the loss; remax/without_baseline counts them.

As in the paper: `--policy-loss reinforce --num-samples-per-prompt 1 --loss-aggregation seq-mean-token-sum`,
with one update per step. With --kl-mode reward the KL is taken off the rewards of the sampled responses; the
greedy answer's reward stays as it was given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megarl.algorithms.base import AdvantageInputs
from megarl.algorithms.group_advantage import GroupAdvantage, GroupStatistics, Peer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ReMax(GroupAdvantage):
    """REINFORCE with the greedy answer's reward as baseline"""

    paper: ClassVar[str] = "2310.10505"
    advantage_formula: ClassVar[str] = "r - reward of the greedy answer to the prompt"
    greedy_samples: ClassVar[int] = 1

    def left_out(self, inputs: AdvantageInputs) -> Tensor:
        """Return [S] bool: whether the greedy answer of a sample's group has no reward."""
        return _baselines(inputs, inputs.rewards).isnan()

    def compute_advantages(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the column and the metrics of `GroupAdvantage`. remax/without_baseline is the number of
        responses with a reward whose greedy answer has none."""
        columns, metrics = GroupAdvantage.compute_advantages(self, inputs)
        is_dropped = self.left_out(inputs) & ~inputs.rewards.isnan()
        metrics["remax/without_baseline"] = float(is_dropped[inputs.counted_rows].sum())
        return columns, metrics

    def step_advantages(self, inputs: AdvantageInputs, rewards: Tensor) -> Tensor:
        return (rewards.double() - _baselines(inputs, rewards)).nan_to_num().float()

    def reference_advantage(self, mine: Peer, group: Sequence[Peer]) -> tuple[float, float]:
        """Return the reward minus that of the member that is not trained on; 0 if it has none."""
        baseline = next((peer.reward for peer in group if not peer.is_trained), mine.reward)
        return mine.reward - baseline, 1.0


def _baselines(inputs: AdvantageInputs, rewards: Tensor) -> Tensor:
    """Return the [S] fp64 reward of the greedy answer of each sample's group; NaN where there is none."""
    assert inputs.is_untrained is not None
    found = GroupStatistics.of(rewards.where(inputs.is_untrained, math.nan), inputs.group_ids)
    return found.total(found.rewards).where(found.count > 0, math.nan)
