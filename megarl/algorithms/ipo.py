"""Identity preference optimization (arXiv:2310.12036, eq. 17): a squared error pulls the difference of the
two log-ratios to the reference towards 1 / (2 beta), so that the difference does not grow without bound.

The paper sums log-probs over an answer. TRL and its users take means over tokens: `--average-log-probs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megarl.algorithms.preference import Answers, ReferencePreference
from megarl.config.errors import Positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class IPO(ReferencePreference):
    """identity preference optimization"""

    paper: ClassVar[str] = "2310.12036"
    advantage_formula: ClassVar[str] = (
        "none: the loss is (log-ratio of chosen - of rejected - 1 / (2 beta))^2"
    )

    beta: Positive = 0.1
    """The loss pulls the difference of a pair's log-ratios towards 1 / (2 beta)."""
    average_log_probs: bool = False
    """Take the mean of a log-ratio over an answer's tokens, as TRL does, in place of the sum."""

    def implicit_rewards(self, answers: Answers) -> Tensor:
        ratios = answers.log_ratios
        return self.beta * (ratios / answers.lengths if self.average_log_probs else ratios)

    def pair_losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        margin = (self.implicit_rewards(chosen) - self.implicit_rewards(rejected)) / self.beta
        return (margin - 1 / (2 * self.beta)).square()
