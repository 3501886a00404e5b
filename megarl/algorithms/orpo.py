"""Odds ratio preference optimization (arXiv:2403.07691): cross-entropy on the chosen answer, and beta times
the log-loss of the odds ratio of both answers. There is no reference.

The probability of an answer is that of its mean log-prob per token. The cross-entropy is a mean over an
answer's tokens, then over the pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megarl.algorithms.preference import Answers, Preference
from megarl.config.errors import Positive

if TYPE_CHECKING:
    from torch import Tensor

_SMALLEST = 1e-12
"""Smallest -log p: an answer of probability 1 would have infinite odds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ORPO(Preference):
    """odds ratio preference optimization"""

    paper: ClassVar[str] = "2403.07691"
    advantage_formula: ClassVar[str] = (
        "none: the loss is -log p(chosen) - beta log sigmoid(log odds ratio), p per token"
    )

    beta: Positive = 0.1
    """Factor of the odds ratio's loss; the paper's lambda."""

    def implicit_rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.mean_log_probs

    def pair_losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        from torch.nn.functional import logsigmoid

        odds = _log_odds(chosen.mean_log_probs) - _log_odds(rejected.mean_log_probs)
        return -chosen.mean_log_probs - self.beta * logsigmoid(odds)


def _log_odds(log_p: Tensor) -> Tensor:
    """Return log(p / (1 - p))."""
    return log_p - (-log_p.clamp(max=-_SMALLEST).expm1()).log()
