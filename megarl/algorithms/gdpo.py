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
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megarl.algorithms.base import AdvantageInputs, ReferenceColumn, ReferenceInputs, advantage_metrics
from megarl.algorithms.policy_gradient import PolicyGradient
from megarl.algorithms.whitening import sums_for_whitening, whitened_reference

if TYPE_CHECKING:
    from torch import Tensor

_OF_SCORES = "changes the reward of a response, and --algorithm gdpo learns from its single scores. {}"
_EPS = 1e-4
"""As in megarl.kernels.group_advantages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GDPO(PolicyGradient):
    """GRPO with several scores, normalized one by one"""

    name: ClassVar[str] = "gdpo"
    paper: ClassVar[str] = "2601.05242"
    advantage_formula: ClassVar[str] = "sum over scores of weight x (s - group mean) / group std, whitened"
    relative_to_group: ClassVar[bool] = True
    takes_scores: ClassVar[bool] = True

    def field_rules(self) -> Iterable[tuple[bool, str, str]]:
        yield from PolicyGradient.field_rules(self)
        yield self.kl_mode != "reward", "kl_mode", _OF_SCORES.format("Try --kl-mode loss.")
        yield (
            self.overlong_buffer is None,
            "overlong_buffer",
            _OF_SCORES.format("Leave it out, and return a score for the length."),
        )

    def compute_advantages(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the advantage of each sample on all of its tokens, and metrics. Needs no sum over ranks.

        Metrics: advantage/max_abs, reward/failed, with a reference kl/per_response and kl/coef."""
        import torch

        from megarl.kernels.group_advantages import group_advantages

        assert inputs.scores is not None
        _, metrics = self._reference_kl(inputs)
        total = torch.zeros(len(inputs.rewards), dtype=torch.float64)
        for name, scores in inputs.scores.of.items():
            normalized = group_advantages(
                torch.tensor(scores), inputs.group_ids, normalize_by_std=True, eps=_EPS
            )
            total += inputs.scores.weights[name] * normalized.double()
        is_valid = ~inputs.rewards.isnan()
        of_valid = total[is_valid]
        variance = of_valid.var() if len(of_valid) > 1 else of_valid.new_zeros(())
        whitened = (total - of_valid.sum() / max(len(of_valid), 1)) * torch.rsqrt(variance + 1e-8)
        advantages = inputs.spread(whitened.where(is_valid, 0.0).float())
        return {"advantages": advantages}, metrics | advantage_metrics(inputs, advantages)

    def reference_sums(self, inputs: ReferenceInputs) -> list[float]:
        """Return sum, sum of squares and count of the weighted sums of normalized scores of this rank's
        samples."""
        found = [_reference_sum(inputs, one) for one in inputs.samples if inputs.episode(one) == one]
        return sums_for_whitening(value for value, _ in filter(None, found))

    def reference_advantages(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn]:
        """Return one sample's advantage on each of its tokens; 0 if its reward failed."""
        num_tokens, found = len(inputs.columns(sample, "advantages")), _reference_sum(inputs, sample)
        if found is None:
            nothing = [0.0] * num_tokens
            return {"advantages": ReferenceColumn(values=nothing, magnitudes=nothing)}
        _, squares, count = inputs.sums
        size = found[1] + math.sqrt(squares / count)  # the mean of the step has the rounding of all its terms
        one = whitened_reference([found[0]], [size], inputs.sums)
        column = ReferenceColumn(values=[*one.values] * num_tokens, magnitudes=[*one.magnitudes] * num_tokens)
        return {"advantages": column}


def _reference_sum(inputs: ReferenceInputs, sample: int) -> tuple[float, float] | None:
    """Return the weighted sum of one sample's normalized scores, and the size of its terms; None if its
    reward failed."""
    assert inputs.scores is not None
    total = size = 0.0
    sample = inputs.episode(sample)
    if math.isnan(inputs.rewards[sample]):
        return None
    members = [member for member in inputs.groups[sample] if not math.isnan(inputs.rewards[member])]
    for name, of_samples in inputs.scores.of.items():
        own, weight = of_samples[inputs.positions[sample]], inputs.scores.weights[name]
        group = [of_samples[inputs.positions[member]] for member in members]
        group = [score for score in group if not math.isnan(score)]
        if len(group) < 2 or math.isnan(own):
            continue
        mean = math.fsum(group) / len(group)
        scale = math.sqrt(math.fsum((score - mean) ** 2 for score in group) / (len(group) - 1)) + _EPS
        normalized = (own - mean) / scale
        total += weight * normalized
        # Scores are rounded to fp32, which moves each deviation, and what it is divided by.
        size += abs(weight) * (max(map(abs, group)) / scale * (1 + abs(normalized)) + abs(normalized))
    return total, size
