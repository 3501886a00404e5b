"""Implement what all policy gradient algorithms share: the policy loss, and the KL to a reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from megarl.algorithms.base import AdvantageInputs, Algorithm, LossInputs, ReferenceColumn, ReferenceInputs
from megarl.algorithms.kl_controller import MAX_ERROR, MEASURED_KL, AdaptiveKLController, FixedKLController
from megarl.config.errors import Fraction, NonNegative, Rule, above, at_least, below

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGradient(Algorithm):
    """policy gradient"""

    policy_loss: Literal["ppo", "cispo"] = "ppo"
    """ppo: a clipped token has no gradient. cispo: the clip only bounds the ratio that weighs a token's
    gradient."""
    clip_eps_low: Fraction = 0.2
    """The policy ratio is clipped at 1 - this."""
    clip_eps_high: NonNegative = 0.2
    """The policy ratio is clipped at 1 + this."""
    clip_ratio_c: Annotated[float, above(1)] | None = None
    """Dual clip of ppo: bound of the ratio where the advantage is negative, above 1, e.g. 3. Default:
    none."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"] = (
        "token-mean"
    )
    """token-mean: tokens count the same. seq-mean-*: sequences do, by their tokens' mean or sum. dr-grpo: sum
    / --max-response-length."""
    kl_mode: Literal["none", "loss", "reward"] = "none"
    """Where the KL to the reference policy is counted: nowhere, in the loss, or taken off the reward (ppo: of
    each token, grpo: of each response)."""
    kl_coef: Annotated[float, at_least(0), below(math.inf)] = 0.0
    """Factor of that KL; above 0 unless --kl-mode none. With --kl-controller adaptive, where it starts."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    """KL estimate per token. k1 is meant for --kl-mode reward: in the loss its gradient is zero on average,
    so it holds nothing back."""
    kl_straight_through: bool = False
    """In the loss, give every estimate the gradient of k2, which is that of the KL."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: after each step --kl-coef is raised if the KL of a response is above --kl-target, and lowered
    if it is below."""
    kl_target: Annotated[float, above(0), below(math.inf)] = 6.0
    """For --kl-controller adaptive: nats per response, by --kl-estimator."""
    kl_horizon: Annotated[int, above(0)] = 10000
    """For --kl-controller adaptive: by how many samples --kl-coef follows. A step of n samples changes it by
    at most 0.2 n / this."""
    entropy_coef: Annotated[float, above(-math.inf), below(math.inf)] = 0.0
    """Factor of the mean entropy, which is subtracted from the loss."""
    tis_clip: Annotated[float, Rule(lambda clip: clip > 0, "must be above 0. Try 2, or none.")] | None = None
    """Truncated importance sampling: each token's loss is weighted by min(trainer's probability / engine's,
    this); none turns it off. Default: 2 with --staleness above 0, else none."""

    def field_rules(self) -> Iterable[tuple[bool, str, str]]:
        if self.kl_mode == "none":
            kl_coef_rule = "must be 0 with --kl-mode none. Leave it out, or try --kl-mode loss."
        else:
            kl_coef_rule = f"must be above 0 with --kl-mode {self.kl_mode}. Try 0.001."
        return [
            (self.policy_loss in ("ppo", "cispo"), "policy_loss", "must be ppo or cispo."),
            (self.kl_mode in ("none", "loss", "reward"), "kl_mode", "must be none, loss or reward."),
            ((self.kl_mode == "none") == (self.kl_coef == 0), "kl_coef", kl_coef_rule),
            (
                not self.kl_straight_through or self.kl_mode == "loss",
                "kl_straight_through",
                "needs --kl-mode loss. Leave it out.",
            ),
            (self.kl_controller in ("fixed", "adaptive"), "kl_controller", "must be fixed or adaptive."),
            (
                self.kl_controller != "adaptive" or self.kl_mode != "none",
                "kl_controller",
                "needs --kl-mode loss or reward. Leave it out.",
            ),
            (
                self.policy_loss != "cispo" or self.clip_ratio_c is None,
                "clip_ratio_c",
                "is not for --policy-loss cispo. Leave it out.",
            ),
        ]

    @property
    def needs_reference(self) -> bool:
        return self.kl_mode != "none"

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef != 0

    @property
    def advantage_reads(self) -> tuple[str, ...]:
        return ("rewards", "old_log_probs", "ref_log_probs") if self.needs_reference else ("rewards",)

    def step_errors(self, num_samples: int) -> Iterable[str]:
        if self.kl_controller == "adaptive" and MAX_ERROR * num_samples >= self.kl_horizon:
            yield (
                f"--kl-horizon ({self.kl_horizon}): must be above {MAX_ERROR} x the samples of a step "
                f"({num_samples}), or the KL's factor may fall to 0 at once. Try {10 * num_samples}."
            )

    def build_kl_controller(self) -> FixedKLController | AdaptiveKLController:
        if self.kl_controller == "adaptive":
            return AdaptiveKLController(self.kl_coef, self.kl_target, self.kl_horizon)
        return FixedKLController(self.kl_coef)

    def _reference_kl(self, inputs: AdvantageInputs) -> tuple[Tensor | None, dict[str, float]]:
        """Return the [N] KL estimate of each token to the reference, before the updates, and its metrics;
        (None, {}) without a reference.

        Metrics: kl/per_response, the mean over the step's samples with a reward of a response's sum, if there
            is such a sample; kl/coef.
        """
        if not self.needs_reference:
            return None, {}
        from megarl.kernels.kl import kl_estimate

        kl = kl_estimate(inputs.old_log_probs, inputs.ref_log_probs, self.kl_estimator)
        is_scored = ~inputs.rewards.isnan()
        metrics = {"kl/coef": inputs.kl_coef * len(inputs.rows) / len(inputs.rewards)}
        if num_scored := int(is_scored.sum()):
            metrics[MEASURED_KL] = kl[inputs.spread(is_scored)].double().sum().item() / num_scored
        return kl, metrics

    def weight_sum(self, num_tokens: int, num_sequences: int, max_response_length: int) -> float:
        from megarl.kernels.aggregate import total_weight

        total = total_weight(self.loss_aggregation, num_tokens, num_sequences, max_response_length)
        return total if self.tis_clip is None else min(self.tis_clip, 1.0) * total

    def _reference_kl_costs(self, inputs: ReferenceInputs, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return, for each token of these samples, what the KL takes off its reward, and the size of the
        terms of that sum; [n] fp64 each."""
        import torch

        empty = [torch.zeros(0)]
        log_probs, ref_log_probs = (
            torch.cat(empty + [inputs.columns(sample, name) for sample in samples]).double()
            for name in ("old_log_probs", "ref_log_probs")
        )
        d = log_probs - ref_log_probs
        match self.kl_estimator:
            case "k1":
                kl = d
            case "abs":
                kl = d.abs()
            case "k2":
                kl = d * d / 2
            case "k3":
                near = d.clamp(-20, 20)  # beyond that k3 is at its limit anyway
                kl = ((-near).exp() - 1 + near).clamp(max=10)
        return inputs.kl_coef * kl, inputs.kl_coef * (1 + log_probs.abs() + ref_log_probs.abs()) * (
            1 + d.abs()
        )

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return clipped policy loss + kl_coef * KL - entropy_coef * entropy, and metrics. All terms have the
        same token weights; truncated importance sampling (TIS) multiplies the policy loss only.

        Metrics: policy/loss; per-token means policy/clip_fraction (the clip took the gradient away; cispo:
        bounded it), policy/kl (k3 of KL(old || now)), policy/dual_clip_fraction, policy/entropy (without
        `needs_entropy` -rollout_log_probs, the sampled estimate for the engine), if used policy/ref_kl and
        policy/tis_weight; policy/ratio_deviation_max, of |ratio - 1|.
        """
        from megarl.kernels.aggregate import token_weights
        from megarl.kernels.policy_loss import PolicyLossOptions, policy_loss

        n = inputs.num_tokens
        loss, stats = policy_loss(
            inputs.log_probs,
            inputs.old_log_probs,
            inputs.advantages,
            token_weights(
                self.loss_aggregation,
                inputs.response_lengths,
                n,
                inputs.num_sequences,
                inputs.max_response_length,
            ),
            PolicyLossOptions(
                kind=self.policy_loss,
                clip_eps_low=self.clip_eps_low,
                clip_eps_high=self.clip_eps_high,
                clip_ratio_c=self.clip_ratio_c,
                tis_clip=self.tis_clip,
                kl_coef=inputs.kl_coef if self.kl_mode == "loss" else 0.0,
                kl_estimator=self.kl_estimator,
                kl_straight_through=self.kl_straight_through,
                entropy_coef=self.entropy_coef,
            ),
            rollout_log_probs=inputs.rollout_log_probs,
            ref_log_probs=inputs.ref_log_probs if self.needs_reference else None,
            entropy=inputs.entropy if self.needs_entropy else -inputs.rollout_log_probs,
        )
        totals = {
            "clip_fraction": stats.num_clipped,
            "dual_clip_fraction": stats.num_dual_clipped,
            "kl": stats.kl_sum,
            "entropy": stats.entropy_sum,
            "ref_kl": stats.ref_kl_sum,
            "tis_weight": stats.tis_weight_sum,
        }
        metrics = {f"policy/{name}": total / n for name, total in totals.items() if total is not None}
        return loss, metrics | {
            "policy/loss": loss.detach(),
            "policy/ratio_deviation_max": stats.ratio_deviation_max,
        }


def whitened_reference(
    values: Sequence[float], magnitudes: Sequence[float], sums: Sequence[float]
) -> ReferenceColumn:
    """Return the whitened values of one sample.

    Args:
        sums: sum, sum of squares and count of the values of all samples of the step."""
    total, squares, count = sums
    mean = total / count
    scale = math.sqrt(max(squares - total * mean, 0.0) / max(count - 1, 1) + 1e-8)
    whitened = [(value - mean) / scale for value in values]
    # Mean and deviation are of rounded numbers too.
    sizes = [(size + abs(mean)) / scale * (1 + abs(value)) for size, value in zip(magnitudes, whitened)]
    return ReferenceColumn(values=whitened, magnitudes=sizes)
