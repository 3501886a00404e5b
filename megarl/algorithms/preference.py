"""Implement what all algorithms share that learn from pairs of a chosen and a rejected answer.

The loss of a pair is a function of the summed log-probs of its two answers. It is computed from the log-probs
before the update, and its derivative by the two sums is the negative advantage of each of their tokens:

    d loss / d log pi(token) = d loss / d (sum of its answer's log-probs)

The update then has the loss - sum of advantage x log-prob, a sum over tokens, whose gradient is that of the
pair loss. So the two answers of a pair may be in any micro-batches, on any data-parallel ranks, and split
over any context-parallel ranks. A step makes one update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from megarl.algorithms.base import AdvantageInputs, Algorithm, LossInputs
from megarl.flow import Flow, symbolic_roles

if TYPE_CHECKING:
    from torch import Tensor


class Answers(NamedTuple):
    """One answer of each of P pairs, all chosen ones or all rejected ones. [P] fp64 each."""

    log_probs: Tensor
    """Sum of the log-probs of the answer's tokens under the policy; carries the gradient."""
    ref_log_probs: Tensor
    """The same under the reference, 0 without one."""
    lengths: Tensor
    """Number of the answer's tokens, including end-of-sequence."""
    scores: Tensor
    """Score of the answer in the data; 1 for chosen and 0 for rejected answers without scores, and for
    labels."""

    @property
    def log_ratios(self) -> Tensor:
        """Log of the answer's probability under the policy divided by that under the reference."""
        return self.log_probs - self.ref_log_probs

    @property
    def mean_log_probs(self) -> Tensor:
        """Mean of the log-probs of the answer's tokens."""
        return self.log_probs / self.lengths


def check_pairs(inputs: AdvantageInputs) -> None:
    """Assert that samples 2 p and 2 p + 1 are the chosen and the rejected answer of pair p."""
    groups = inputs.group_ids.view(-1, 2)
    assert bool((groups[:, 0] == groups[:, 1]).all()), "the two answers of a pair follow each other"


def slope_column(inputs: AdvantageInputs, loss: Tensor, of_samples: Tensor) -> dict[str, Tensor]:
    """Return the column advantages, the negative derivative of the loss by the number of each token's sample.

    Args:
        of_samples: [S], from which the loss was computed."""
    import torch

    (slope,) = torch.autograd.grad(loss, of_samples)
    return {"advantages": inputs.spread(-slope).float()}


def reward_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return the metrics of [P] rewards of chosen and of rejected answers, means over the pairs."""
    return {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).double().mean(),
    }


def this_rank(inputs: AdvantageInputs, metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Return this rank's part of metrics that all ranks know. The parts of all ranks add up to the metric."""
    share = len(inputs.counted_rows) / len(inputs.rewards)
    return {name: value.item() * share for name, value in metrics.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference(Algorithm):
    """learning from pairs"""

    needs_rollout: ClassVar[bool] = False
    one_update: ClassVar[bool] = True
    """The advantages are the slope of the loss before the update."""
    row_needs: ClassVar[Literal["response", "pair", "scored_pair", "labelled"]] = "pair"

    @property
    def advantage_reads(self) -> tuple[str, ...]:
        return ("old_log_probs", *(("ref_log_probs",) if self.needs_reference else ()))

    @property
    def loss_reads(self) -> tuple[str, ...]:
        return ("advantages",)

    def implicit_rewards(self, answers: Answers) -> Tensor:
        """Return the [P] implicit rewards of the answers under the policy, by which pairs are compared."""
        raise NotImplementedError

    def pair_losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """Return the [P] losses of the pairs, differentiable in the answers' `log_probs`."""
        raise NotImplementedError

    def pair_metrics(self, chosen: Answers, rejected: Answers) -> dict[str, Tensor]:
        """Return the metrics of a step beside policy/loss, means over its pairs."""
        return reward_metrics(self.implicit_rewards(chosen), self.implicit_rewards(rejected)) | {
            "logps/chosen": chosen.log_probs.mean(),
            "logps/rejected": rejected.log_probs.mean(),
        }

    def flow(self, roles: Iterable[str]) -> Flow:
        """Return the flow of a step: rows of the data become pairs of samples, policy and reference score
        them, and the actor makes one update."""
        actor, reference = symbolic_roles("actor reference", present=roles)
        return (
            actor.receive_rows()
            .then(actor.log_probs, reads=("tokens", "weights:actor"), writes=("old_log_probs",))
            .then(reference.log_probs, reads=("tokens",), writes=("ref_log_probs",))
            .advantages(self)
            .update(actor, reads=("tokens", "old_log_probs", *self.loss_reads))
        )

    def pair_rows(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        """Return the [P] samples that are the chosen answers of pairs, and the [P] that are the rejected
        ones."""
        import torch

        check_pairs(inputs)
        rows = torch.arange(len(inputs.rewards))
        return rows[0::2], rows[1::2]

    def compute_advantages(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the column advantages, the negative derivative of the mean pair loss by each token's
        log-prob.

        Metrics, means over the pairs, if there are any: policy/loss, rewards/chosen, rewards/rejected,
        rewards/margins, rewards/accuracies (share of pairs whose chosen answer has the larger implicit
        reward), logps/chosen and logps/rejected (sums over an answer).
        """
        import torch

        pairs = self.pair_rows(inputs)
        log_probs = inputs.sum_per_sample(inputs.old_log_probs).requires_grad_()
        refs = torch.zeros_like(log_probs)
        if self.needs_reference:
            refs = inputs.sum_per_sample(inputs.ref_log_probs)
        columns = [log_probs, refs, inputs.sample_lengths.double(), inputs.rewards.double()]
        sides = [[column[rows] for column in columns] for rows in pairs]
        chosen, rejected = (Answers(*side) for side in sides)
        if not len(pairs[0]):
            return {"advantages": torch.zeros(int(inputs.response_lengths.sum()))}, {"policy/loss": 0.0}
        with torch.enable_grad():
            loss = self.pair_losses(chosen, rejected).mean()
        columns = slope_column(inputs, loss, log_probs)
        with torch.no_grad():
            metrics = {"policy/loss": loss} | self.pair_metrics(chosen, rejected)
        return columns, this_rank(inputs, metrics)

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return minus the sum of advantage times log-prob, whose gradient is that of the mean pair loss. The
        metrics are those of `compute_advantages`."""
        return -(inputs.advantages * inputs.log_probs).sum(), {}

    def weight_sum(self, num_tokens: int, num_sequences: int, max_response_length: int) -> float:
        return float(num_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferencePreference(Preference):
    """learning from pairs, beside a reference"""

    precompute_ref_log_probs: bool = False
    """Compute the reference's log-probs of all rows before training, into ref_log_probs/ of the run folder.
    Then no reference is in memory while the policy trains, and a resumed run reads them."""

    @property
    def needs_reference(self) -> bool:
        return True
