"""Group Relative Policy Optimization (arXiv:2402.03300): PPO's clipped loss, and no critic: a reward is
judged within its prompt's group.

Not as in the paper, which is `--loss-aggregation seq-mean-token-mean --kl-mode loss --kl-coef 0.04`:
token-mean and no KL by default. Dr. GRPO (2503.20783) is `--loss-aggregation dr-grpo
--no-normalize-advantages-by-std`, DAPO's clip (2503.14476) `--clip-eps-high 0.28`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megarl.algorithms.base import AdvantageInputs, ReferenceColumn, ReferenceInputs, advantage_metrics
from megarl.algorithms.clipped_policy import ClippedPolicy

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPO(ClippedPolicy):
    """group relative policy optimization"""

    relative_to_group: ClassVar[bool] = True
    normalize_advantages_by_std: bool = True
    """Divide the advantages by the standard deviation of their group's rewards."""

    def compute_advantages(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return each sample's advantage within its group, on all of its tokens, and metrics. Needs one sum
        over ranks with kl_mode reward, else none.

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

    def reference_sums(self, inputs: ReferenceInputs) -> list[float] | None:
        """Return, for every sample of the step, what the KL takes off its reward, then the sizes of these
        sums' terms; None unless kl_mode is reward."""
        if self.kl_mode != "reward":
            return None
        lengths = [len(inputs.columns(sample, "advantages")) for sample in inputs.samples]
        sums = []
        for per_token in self._reference_kl_costs(inputs, inputs.samples):
            here = dict(zip(inputs.samples, (float(part.sum()) for part in per_token.split(lengths))))
            sums += [here.get(sample, 0.0) for sample in inputs.rewards]
        return sums

    def reference_advantages(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn]:
        """Return (reward - mean of its group) / (standard deviation + 1e-4) of one sample, on each of its
        tokens."""
        num_tokens, count = len(inputs.columns(sample, "advantages")), len(inputs.rewards)
        sums = inputs.sums or [0.0] * 2 * count
        rewards = {s: inputs.rewards[s] - sums[inputs.positions[s]] for s in inputs.groups[sample]}
        group = [reward for reward in rewards.values() if not math.isnan(reward)]
        if math.isnan(rewards[sample]) or len(group) == 1:
            return {"advantages": ReferenceColumn(values=[0.0] * num_tokens, magnitudes=[0.0] * num_tokens)}
        mean = sum(group) / len(group)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in group) / (len(group) - 1))
        scale = std + 1e-4 if self.normalize_advantages_by_std else 1.0
        advantage = (rewards[sample] - mean) / scale
        # Rewards are rounded to fp32, which moves each deviation, and the standard deviation that it is
        # divided by.
        sizes = [
            abs(inputs.rewards[s]) + sums[count + inputs.positions[s]]
            for s, reward in rewards.items()
            if not math.isnan(reward)
        ]
        size = max(sizes) / scale
        magnitude = size * (1 + abs(advantage) * self.normalize_advantages_by_std) + abs(advantage)
        return {
            "advantages": ReferenceColumn(
                values=[advantage] * num_tokens, magnitudes=[magnitude] * num_tokens
            )
        }
