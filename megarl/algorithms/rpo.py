"""Reward-aware preference optimization (arXiv:2406.11704, section 3.3.2): the loss pulls the difference of
the implicit rewards towards eta times the difference of the scores in the data. The loss is the KL between
the two Bernoulli distributions.

DPO only knows which answer is better; here an answer that is a little better is pushed a little. What TRL
calls RPO (`rpo_alpha`) is `--algorithm dpo --nll-coef`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from megarl.algorithms.preference import Answers, ReferencePreference
from megarl.config.errors import Positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RPO(ReferencePreference):
    """reward-aware preference optimization"""

    paper: ClassVar[str] = "2406.11704"
    advantage_formula: ClassVar[str] = (
        "none: the loss is KL(sigmoid(eta score difference), sigmoid(DPO's margin))"
    )
    row_needs: ClassVar[Literal["response", "pair", "scored_pair", "labelled"]] = "scored_pair"

    beta: Positive = 0.1
    """How strongly the policy is held at the reference: factor of the log-ratio in the implicit reward."""
    eta: Positive = 1.0
    """Factor of the difference of the scores."""

    def implicit_rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.log_ratios

    def pair_losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        from torch.nn.functional import logsigmoid

        margin = self.implicit_rewards(chosen) - self.implicit_rewards(rejected)
        wanted = self.eta * (chosen.scores - rejected.scores)
        better = wanted.sigmoid() * (logsigmoid(wanted) - logsigmoid(margin))
        return better + (-wanted).sigmoid() * (logsigmoid(-wanted) - logsigmoid(-margin))
