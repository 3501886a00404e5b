"""Supervised fine-tuning: cross-entropy on the responses of the data set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from megarl.algorithms.base import Algorithm, LossInputs
from megarl.algorithms.cross_entropy import cross_entropy
from megarl.flow import Flow, symbolic_roles

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SFT(Algorithm):
    """supervised fine-tuning"""

    needs_rollout: ClassVar[bool] = False
    paper: ClassVar[str] = "2203.02155"
    advantage_formula: ClassVar[str] = "none: cross-entropy on the data set's responses"

    train_turns: Literal["last", "all"] = "last"
    """Which of the assistant's turns of a row with `messages` are trained on: the last one, or all of them.
    With all, the other messages between them are context, as in an episode with --env."""

    @property
    def loss_reads(self) -> tuple[str, ...]:
        return ()

    def flow(self, roles: Iterable[str]) -> Flow:
        """Return the flow of a fine-tuning step: rows of the data become the samples, and the actor is
        updated on them."""
        (actor,) = symbolic_roles("actor", present=roles)
        return actor.receive_rows().update(actor, reads=("tokens", *self.loss_reads))

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean negative log-prob over the response tokens of the whole mini-batch, and as a
        metric, policy/loss, the same number."""
        loss = cross_entropy(inputs.log_probs, inputs.num_tokens)
        return loss, {"policy/loss": loss.detach()}

    def weight_sum(self, num_tokens: int, num_sequences: int, max_response_length: int) -> float:
        return 1.0
