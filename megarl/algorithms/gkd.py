"""Generalized knowledge distillation on policy (arXiv:2306.13649): the policy samples, and learns at each
sampled token from the teacher's whole distribution, not from the one token that was drawn.

    loss = mean over tokens of D(policy, teacher)        D: reverse KL, forward KL, or a Jensen-Shannon divergence

The divergence is exact over the vocabulary, or over the teacher's k most likely tokens and one outcome that
stands for the others. It has a gradient of its own, so there are no advantages, no ratio and no corrections:
what sampled the tokens only chooses where the two are compared. Rewards are measured and not learned from,
and a sample whose reward failed is left out.

The teacher is the reference: another model, or the policy's own model, whose prompt is extended by a hint
(arXiv:2601.19897 and kin).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from megarl.algorithms.aggregation import LossAggregation, token_weights, total_weight
from megarl.algorithms.base import AdvantageInputs, Algorithm, LossInputs, advantage_metrics
from megarl.config.errors import Count, FieldRules, Rule, above, below
from megarl.config.teachers import TEACHERS_RULE, are_teachers

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.kernels.divergence import Divergence


@dataclass(frozen=True, kw_only=True, slots=True)
class GKD(Algorithm):
    """on-policy distillation of a teacher's whole distribution"""

    paper: ClassVar[str] = "2306.13649"
    needs_correction: ClassVar[bool] = False
    advantage_formula: ClassVar[str] = "none: the loss is the divergence of the policy from the teacher"

    divergence: Literal["reverse-kl", "forward-kl", "jsd"] = "reverse-kl"
    """Divergence that is minimised at each token. reverse-kl: KL(policy, teacher), which keeps to what the
    teacher would write; forward-kl: KL(teacher, policy), which covers all of it; jsd: between them, by
    --jsd-beta."""
    jsd_beta: Annotated[float, above(0), below(1)] = 0.5
    """For --divergence jsd: weight of the teacher in the mixture that both are compared with. Near 0 it is
    like forward-kl, near 1 like reverse-kl."""
    teacher_top_k: Count | None = None
    """Compare over the teacher's so many most likely tokens and one outcome for all others: 8 bytes of each
    are moved per token, not the teacher's hidden state. Default: the whole vocabulary."""
    teachers: Annotated[tuple[str, ...], Rule(are_teachers, TEACHERS_RULE)] = ()
    """Further teachers, data_source=folder each: rows of this source are taught by this model, and all others
    by --reference-model. Default: none."""
    teacher_hint_key: str | None = None
    """Self-distillation: the teacher's prompt ends with this text of the row's extra_info, e.g. a solution,
    which the policy does not see. Default: none."""
    loss_aggregation: LossAggregation = "token-mean"
    """token-mean: tokens count the same. seq-mean-*: sequences do, by their tokens' mean or sum. dr-grpo: sum
    / --max-response-length."""

    def field_rules(self) -> FieldRules:
        rule = "is for --divergence jsd. Leave it out."
        needs_k = "needs --teacher-top-k: the output layers of several teachers would be on the actor's ranks. Try 64."
        yield not self.teachers or self.teacher_top_k is not None, "teachers", needs_k
        yield self.divergence == "jsd" or self.jsd_beta == 0.5, "jsd_beta", rule

    @property
    def is_taught(self) -> bool:
        return self.teacher_hint_key is None

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def teacher_column(self) -> str:
        return "teacher_hidden" if self.teacher_top_k is None else "teacher_top_k"

    @property
    def loss_reads(self) -> tuple[str, ...]:
        return ("old_log_probs", "advantages", self.teacher_column)

    def teacher_divergence(self) -> Divergence:
        from megarl.kernels.divergence import Divergence

        return Divergence(self.divergence, self.jsd_beta)

    def compute_advantages(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the column advantages, 0 throughout, in which the actor marks the samples that are left out.

        The loss does not read its values. Metrics: reward/failed."""
        advantages = inputs.spread(inputs.rewards.new_zeros(len(inputs.rewards)))
        num_failed = advantage_metrics(inputs, advantages)["reward/failed"]
        return {"advantages": advantages}, {"reward/failed": num_failed}

    def weight_sum(self, num_tokens: int, num_sequences: int, max_response_length: int) -> float:
        return total_weight(self.loss_aggregation, num_tokens, num_sequences, max_response_length)

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the aggregated divergence. Metrics: policy/loss; per-token means distill/divergence and
        policy/entropy, the sampled estimate for the engine."""
        loss = (token_weights(self.loss_aggregation, inputs) * inputs.divergence).sum()
        return loss, {
            "policy/loss": loss.detach(),
            "distill/divergence": inputs.divergence.detach().sum() / inputs.num_tokens,
            "policy/entropy": -inputs.rollout_log_probs.sum() / inputs.num_tokens,
        }
