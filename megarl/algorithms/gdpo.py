"""Group reward-decoupled normalization policy optimization (arXiv:2601.05242, eq. 4 to 6): several scores of
a response are normalized one by one within the prompt's group, and only then added.

    A_k = (score k - its group mean) / (its group std + 1e-4)
    A   = sum of weight_k A_k
    advantage = (A - mean of A over the step) / sqrt(variance of A over the step + 1e-8)

Normalizing the sum of the scores, as GRPO does, gives responses with different scores the same advantage if
the sums are equal. The scores are those of a reward function that returns several, and of each reward model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from megarl.algorithms.base import AdvantageInputs, ReferenceColumn, ReferenceInputs, advantage_metrics
from megarl.algorithms.group_advantage import normalized_in_group, rounded_size
from megarl.algorithms.policy_gradient import PolicyGradient
from megarl.algorithms.reference_kl import reference_kl
from megarl.algorithms.whitening import sums_for_whitening, whitened_over_samples, whitened_reference
from megarl.config.errors import FieldRules

if TYPE_CHECKING:
    from torch import Tensor

_OF_SCORES = "changes the reward of a response, and --algorithm gdpo learns from its single scores."


@dataclass(frozen=True, kw_only=True, slots=True)
class GDPO(PolicyGradient):
    """GRPO with several scores, normalized one by one"""

    name: ClassVar[str] = "gdpo"
    paper: ClassVar[str] = "2601.05242"
    advantage_formula: ClassVar[str] = "sum over scores of weight x (s - group mean) / group std, whitened"
    relative_to_group: ClassVar[bool] = True
    takes_scores: ClassVar[bool] = True

    def field_rules(self) -> FieldRules:
        yield from PolicyGradient.field_rules(self)
        yield self.kl_mode != "reward", "kl_mode", f"{_OF_SCORES} Try --kl-mode loss."
        advice = f"{_OF_SCORES} Leave it out, and return a score for the length."
        yield self.overlong_buffer is None, "overlong_buffer", advice

    def compute_advantages(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the advantage of each sample on all of its tokens, and metrics. Needs no sum over ranks.

        Metrics: advantage/max_abs, reward/failed, with a reference kl/per_response and kl/coef."""
        import torch

        from megarl.kernels.group_advantages import group_advantages

        _, metrics = reference_kl(self, inputs)
        total = torch.zeros(len(inputs.rewards), dtype=torch.float64)
        for name, scores in inputs.scores.of.items():
            normalized = group_advantages(torch.tensor(scores), inputs.group_ids, normalize_by_std=True)
            total += inputs.scores.weights[name] * normalized.double()
        whitened = whitened_over_samples(total, ~inputs.rewards.isnan())
        advantages = inputs.spread(whitened.float())
        return {"advantages": advantages}, metrics | advantage_metrics(inputs, advantages)

    def reference_sums(self, inputs: ReferenceInputs) -> list[float]:
        """Return sum, sum of squares and count of the weighted sums of normalized scores of this rank's
        samples."""
        episodes = [one for one in inputs.samples if inputs.episode(one) == one and inputs.has_reward(one)]
        return sums_for_whitening(_reference(inputs, episode).values for episode in episodes)

    def reference_advantages(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn]:
        """Return one sample's advantage on each of its tokens; 0 if its reward failed."""
        num_tokens = len(inputs.columns(sample, "advantages"))
        if not inputs.has_reward(sample):
            return {"advantages": ReferenceColumn.constant(num_tokens)}
        _, squares, count = inputs.sums
        found = _reference(inputs, inputs.episode(sample))
        # The mean of the step has the rounding of all its terms.
        found = replace(found, magnitudes=[found.magnitudes[0] + math.sqrt(squares / count)])
        whitened = whitened_reference(found, inputs.sums)
        return {"advantages": ReferenceColumn.constant(num_tokens, *whitened.values, *whitened.magnitudes)}


def _reference(inputs: ReferenceInputs, episode: int) -> ReferenceColumn:
    """Return the weighted sum of the normalized scores of an episode with a reward, in plain Python."""
    total = size = 0.0
    members = [inputs.positions[member] for member in inputs.groups[episode] if inputs.has_reward(member)]
    for name, of_samples in inputs.scores.of.items():
        mine, weight = of_samples[inputs.positions[episode]], inputs.scores.weights[name]
        group = [of_samples[at] for at in members if not math.isnan(of_samples[at])]
        if len(group) > 1 and not math.isnan(mine):
            normalized, scale = normalized_in_group(mine, group)
            total += weight * normalized
            size += abs(weight) * rounded_size(normalized, scale, max(map(abs, group)))
    return ReferenceColumn(values=[total], magnitudes=[size])
