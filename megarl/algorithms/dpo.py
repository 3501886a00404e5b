"""Direct preference optimization (arXiv:2305.18290): the policy's log-ratio to the reference, times beta, is
an implicit reward, and preferences follow the Bradley-Terry model of these rewards.

With label smoothing it is conservative DPO: that share of the labels is believed to be wrong. With `nll_coef`
it is the loss of iterative reasoning preference optimization (arXiv:2404.19733), `rpo_alpha` in TRL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from megarl.algorithms.preference import Answers, ReferencePreference
from megarl.config.errors import NonNegative, Positive, at_least, below

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DPO(ReferencePreference):
    """direct preference optimization"""

    paper: ClassVar[str] = "2305.18290"
    advantage_formula: ClassVar[str] = (
        "none: the loss is -log sigmoid(beta (log-ratio of chosen - of rejected))"
    )

    beta: Positive = 0.1
    """How strongly the policy is held at the reference: factor of the log-ratio in the implicit reward."""
    label_smoothing: Annotated[float, at_least(0), below(0.5)] = 0.0
    """Share of the pairs whose chosen and rejected answers are believed to be swapped."""
    nll_coef: NonNegative = 0.0
    """Factor of the chosen answers' mean negative log-prob per token, which is added to the loss."""

    def implicit_rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.log_ratios

    def pair_losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        from torch.nn.functional import logsigmoid

        margin = self.implicit_rewards(chosen) - self.implicit_rewards(rejected)
        smoothing = self.label_smoothing
        losses = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
        return losses - self.nll_coef * chosen.mean_log_probs
