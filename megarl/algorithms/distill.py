"""On-policy distillation (arXiv:2306.13649): the policy samples, and learns from each token's log-probability
under a teacher, which is the reference (--reference-model).

    A(t) = log teacher(t) - log pi_old(t)

On average over tokens that the policy samples, -A is the KL of the policy to the teacher, and the policy
gradient of A is minus that KL's gradient by the distribution of token t: the reverse KL, judged by sampled
tokens, with no credit for later ones (discount 0, as in arXiv:2306.08543's single-step part). Several teachers
of a sample, with weights w that add up to 1, give A(t) = sum w log teacher(t) - log pi_old(t): the mean of their
KLs with these weights. No reward is learned from; rewards are measured, and a sample whose reward failed is left
out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from megarl.algorithms.base import AdvantageInputs, ReferenceColumn, ReferenceInputs, advantage_metrics
from megarl.algorithms.policy_gradient import PolicyGradient
from megarl.config.errors import FieldRules, Positive, Rule
from megarl.config.teachers import WEIGHED_RULE, are_weighed_teachers, weight_rules

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Distill(PolicyGradient):
    """on-policy distillation of a teacher"""

    is_taught: ClassVar[bool] = True
    paper: ClassVar[str] = "2306.13649"
    advantage_formula: ClassVar[str] = "log teacher - log pi, of each sampled token"

    teachers: Annotated[tuple[str, ...], Rule(are_weighed_teachers, WEIGHED_RULE)] = ()
    """Further teachers, data_source=folder each: rows of this source are taught by this model, and all others by
    --reference-model. Default: none."""
    teacher_weights: tuple[float, ...] | None = None
    """Weights of --teachers, one number each, when several teach the rows of a source: a token's log-probs are
    averaged with them. Those of a source add up to 1. Default: a source has one teacher."""
    distill_clip: Positive | None = None
    """Bound of a token's advantage in nats, e.g. 10. Default: none."""

    def field_rules(self) -> FieldRules:
        yield from PolicyGradient.field_rules(self)
        yield from weight_rules(self.teachers, self.teacher_weights)
        yield self.kl_mode == "none", "kl_mode", "is not for distill: its advantage is the KL. Leave it out."

    @property
    def needs_reference(self) -> bool:
        return True

    def compute_advantages(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the column advantages, and metrics: distill/kl, the mean of log pi - log teacher over the
        step's sampled tokens with a reward; advantage/max_abs and reward/failed."""
        gap = inputs.ref_log_probs - inputs.old_log_probs
        is_scored = ~inputs.rewards.isnan()
        num_tokens = int(inputs.sample_lengths[is_scored].sum())
        is_learned = inputs.spread(is_scored)
        kl = -gap[is_learned].double().sum().item() / max(num_tokens, 1)
        if self.distill_clip is not None:
            gap = gap.clamp(-self.distill_clip, self.distill_clip)
        advantages = gap.where(is_learned, 0.0)
        return {"advantages": advantages}, {"distill/kl": kl} | advantage_metrics(inputs, advantages)

    def reference_advantages(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn]:
        """Return the advantages of one sample, a token at a time."""
        old, teacher = (inputs.columns(sample, name).tolist() for name in ("old_log_probs", "ref_log_probs"))
        has_reward = inputs.has_reward(sample)
        bound = float("inf") if self.distill_clip is None else self.distill_clip
        values = [
            min(max(b - a, -bound), bound) if has_reward else 0.0 for a, b in zip(old, teacher, strict=True)
        ]
        sizes = [abs(a) + abs(b) for a, b in zip(old, teacher, strict=True)]
        return {"advantages": ReferenceColumn(values=values, magnitudes=sizes)}
