"""Simple preference optimization (arXiv:2405.14734): the mean log-prob of an answer's tokens, times beta, is
its reward, and the chosen one must be ahead by a margin. There is no reference.

The paper's ranges are beta 2 to 2.5 (10 for strong models) and a margin of 0.3 to 1.6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megarl.algorithms.preference import Answers, Preference
from megarl.config.errors import NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SimPO(Preference):
    """simple preference optimization"""

    paper: ClassVar[str] = "2405.14734"
    advantage_formula: ClassVar[str] = (
        "none: the loss is -log sigmoid(beta (mean log-prob of chosen - of rejected) - margin)"
    )

    beta: Positive = 2.0
    """Factor of the mean log-prob in the implicit reward."""
    simpo_gamma: NonNegative = 1.0
    """Margin by which the implicit reward of the chosen answer must be ahead."""

    def implicit_rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.mean_log_probs

    def pair_losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        from torch.nn.functional import logsigmoid

        margin = self.implicit_rewards(chosen) - self.implicit_rewards(rejected)
        return -logsigmoid(margin - self.simpo_gamma)
