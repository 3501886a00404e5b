"""Train a reward model on pairs, by the Bradley-Terry model (arXiv:2203.02155, section 3.5): the probability that the
chosen answer is the better one is the sigmoid of the difference of the two scores.

The model gives an answer one number, the output of its score head at the answer's last token. With `margin` the
difference should exceed it (arXiv:2307.09288, section 3.2.2). With `center_coef` the scores of a pair are drawn to a
sum of 0, which the difference leaves open (arXiv:2312.09244, section 2).

As in `preference`, the loss is differentiated by the scores before the update, so the answers of a pair may be
anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from megarl.algorithms.base import AdvantageInputs, Algorithm, ScoreLossInputs
from megarl.algorithms.preference import check_pairs, reward_metrics, slope_column, this_rank
from megarl.config.errors import NonNegative
from megarl.flow import Flow, symbolic_roles

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class BradleyTerry(Algorithm):
    """reward model learnt from pairs"""

    name: ClassVar[str] = "bradley-terry"
    needs_rollout: ClassVar[bool] = False
    trains_scores: ClassVar[bool] = True
    token_level: ClassVar[bool] = False
    paper: ClassVar[str] = "2203.02155"
    advantage_formula: ClassVar[str] = (
        "none: the loss is -log sigmoid(score of chosen - of rejected - margin)"
    )

    margin: NonNegative = 0.0
    """How much better the chosen answer's score should be than the rejected one's. With --margin-from-scores:
    how much per unit of difference of the row's scores."""
    margin_from_scores: bool = False
    """Multiply --margin by the difference of the row's score_chosen and score_rejected."""
    center_coef: NonNegative = 0.0
    """Factor of the squared sum of the two scores, which is added to the loss."""

    @property
    def row_needs(self) -> Literal["response", "pair", "scored_pair", "labelled"]:
        return "scored_pair" if self.margin_from_scores else "pair"

    @property
    def advantage_reads(self) -> tuple[str, ...]:
        return ("old_scores",)

    @property
    def loss_reads(self) -> tuple[str, ...]:
        return ("old_scores", "advantages")

    def flow(self, roles: Iterable[str]) -> Flow:
        """Return the flow of a step: rows of the data become pairs of samples, the model scores them, and makes
        one update."""
        (actor,) = symbolic_roles("actor", present=roles)
        return (
            actor.receive_rows()
            .then(actor.scores, reads=("tokens", "weights:actor"), writes=("old_scores",))
            .advantages(self)
            .update(actor, reads=("tokens", *self.loss_reads))
        )

    def compute_advantages(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the column advantages, the negative derivative of the mean pair loss by each answer's score.

        Samples 2 p and 2 p + 1 are the chosen and the rejected answer of pair p, with one response token each.
        Metrics, means over the pairs: policy/loss, rewards/chosen and rewards/rejected (the model's scores),
        rewards/margins (their difference), and rewards/accuracies, the share of pairs whose chosen answer has
        the larger score.
        """
        import torch
        from torch.nn.functional import logsigmoid

        check_pairs(inputs)
        scores, of_row = inputs.sum_per_sample(inputs.old_scores).requires_grad_(), inputs.rewards.double()
        with torch.enable_grad():
            chosen, rejected = scores[::2], scores[1::2]
            margin = self.margin * (of_row[::2] - of_row[1::2] if self.margin_from_scores else 1.0)
            losses = -logsigmoid(chosen - rejected - margin)
            loss = (losses + self.center_coef * (chosen + rejected).square()).mean()
        columns = slope_column(inputs, loss, scores)
        return columns, this_rank(inputs, {"policy/loss": loss} | reward_metrics(chosen, rejected))

    def score_loss(self, inputs: ScoreLossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return minus the sum of advantage times score, whose gradient is that of the mean pair loss. The
        metrics are those of `compute_advantages`."""
        return -(inputs.advantages * inputs.scores).sum(), {}
