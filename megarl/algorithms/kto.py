"""Kahneman-Tversky optimization (arXiv:2402.01306, eq. 8): each answer is desirable or not, without a pair,
and its implicit reward is judged against the KL of the policy to the reference.

The KL is estimated from answers to other prompts, as in the paper: the mean log-ratio over the step, on all
ranks, at least 0. A row's mismatched answer is that of the first row with another prompt, from half the data
set away on. It carries no gradient. The mismatched answers pass through the update too, with weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from megarl.algorithms.preference import Answers, ReferencePreference
from megarl.config.errors import Positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class KTO(ReferencePreference):
    """Kahneman-Tversky optimization"""

    paper: ClassVar[str] = "2402.01306"
    advantage_formula: ClassVar[str] = (
        "none: the loss is 1 - sigmoid(+-beta (log-ratio - KL)), by the answer's label"
    )
    row_needs: ClassVar[Literal["response", "pair", "scored_pair", "labelled"]] = "labelled"

    beta: Positive = 0.1
    """How strongly the policy is held at the reference: factor of the log-ratio in the implicit reward."""
    desirable_weight: Positive = 1.0
    """Weight of the loss of desirable answers. With unequal numbers of both kinds choose weights that make up
    for it."""
    undesirable_weight: Positive = 1.0
    """Weight of the loss of undesirable answers."""

    def implicit_rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.log_ratios

    def pair_losses(self, answers: Answers, mismatched: Answers) -> Tensor:
        """Return the [P] losses of labelled answers. `mismatched` are as many answers that belong to other
        prompts, from which the KL is estimated."""
        is_desirable = answers.scores > 0.5
        gain = self.implicit_rewards(answers) - self.beta * _kl(mismatched)
        good = self.desirable_weight * (1 - gain.sigmoid())
        return good.where(is_desirable, self.undesirable_weight * (1 - (-gain).sigmoid()))

    def pair_metrics(self, answers: Answers, mismatched: Answers) -> dict[str, Tensor]:
        """Return the metrics of a step: kl/mismatched, and means over the desirable (chosen) and the
        undesirable (rejected) answers, as far as there are any."""
        rewards, is_desirable = self.implicit_rewards(answers), answers.scores > 0.5
        metrics = {"kl/mismatched": _kl(mismatched)}
        for name, rows in (("chosen", is_desirable), ("rejected", ~is_desirable)):
            if rows.any():
                metrics[f"rewards/{name}"] = rewards[rows].mean()
                metrics[f"logps/{name}"] = answers.log_probs[rows].mean()
        if len(metrics) == 5:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics


def _kl(mismatched: Answers) -> Tensor:
    """Return the mean log-ratio of the answers, or 0 if the mean is negative, without gradient."""
    return mismatched.log_ratios.detach().mean().clamp(min=0)
