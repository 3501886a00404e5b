"""Group Relative Policy Optimization (arXiv:2402.03300): PPO's clipped loss, and no critic: a reward is judged within its prompt's group.

Not as in the paper, which is `--loss-aggregation seq-mean-token-mean --kl-mode loss --kl-coef 0.04`: token-mean and no KL by default.
Dr. GRPO (2503.20783) is `--loss-aggregation dr-grpo --no-normalize-advantages-by-std`, DAPO's clip (2503.14476) `--clip-eps-high 0.28`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megarl.algorithms.base import Algorithm, LossInputs
from megarl.config.errors import require

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPO(Algorithm):
    """group relative policy optimization"""

    clip_eps_low: float = 0.2
    """The policy ratio is clipped at 1 - this."""
    clip_eps_high: float = 0.2
    """The policy ratio is clipped at 1 + this."""
    clip_ratio_c: float | None = None
    """Dual clip: bound of the ratio where the advantage is negative, above 1, e.g. 3. Default: none."""
    normalize_advantages_by_std: bool = True
    """Divide the advantages by the standard deviation of their group's rewards."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"] = "token-mean"
    """token-mean: tokens count the same. seq-mean-*: sequences do, by their tokens' mean or sum. dr-grpo: sum / --max-response-length."""
    kl_mode: Literal["none", "loss", "reward"] = "none"
    """Where the KL to the reference policy is counted: nowhere, in the loss, or taken off each response's reward."""
    kl_coef: float = 0.0
    """Factor of that KL; above 0 unless --kl-mode none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """KL estimate per token. k1 is meant for --kl-mode reward: in the loss its gradient is zero on average, so it holds nothing back."""
    entropy_coef: float = 0.0
    """Factor of the mean entropy, which is subtracted from the loss."""
    tis_clip: float | None = None
    """Truncated importance sampling: each token's loss is weighted by min(trainer's probability / engine's, this). Default: off."""

    def __post_init__(self) -> None:
        require(self, at_least={"clip_eps_low": 0, "clip_eps_high": 0, "kl_coef": 0}, at_most={"clip_eps_low": 1},
                above={"clip_ratio_c": 1, "tis_clip": 0, "entropy_coef": -math.inf}, below={"kl_coef": math.inf, "entropy_coef": math.inf},
                rules=[(self.kl_mode in ("none", "loss", "reward"), "kl_mode", "must be none, loss or reward."),
                       ((self.kl_mode == "none") == (self.kl_coef == 0), "kl_coef",
                        f"must be 0 with --kl-mode none, and above 0 with loss or reward, e.g. 0.001. --kl-mode is {self.kl_mode}.")])

    @property
    def needs_reference(self) -> bool:
        return self.kl_mode != "none"

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef != 0

    def reward_kl(self, old_log_probs: Tensor, ref_log_probs: Tensor) -> Tensor | None:
        from megarl.kernels.kl import kl_estimate
        return kl_estimate(old_log_probs, ref_log_probs, self.kl_estimator) if self.kl_mode == "reward" else None

    def compute_advantages(self, rewards: Tensor, group_ids: Tensor, kl: Tensor | None = None) -> Tensor:
        from megarl.kernels.group_advantages import group_advantages
        if self.kl_mode == "reward":
            rewards = rewards - self.kl_coef * kl
        return group_advantages(rewards, group_ids, self.normalize_advantages_by_std)

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Clipped policy loss + kl_coef * KL - entropy_coef * entropy, all with the same token weights; TIS weighs the first only.

        Metrics: policy/loss; per-token means policy/clip_fraction (the clip took the gradient away), policy/dual_clip_fraction,
        policy/kl (k3 of KL(old || now)), policy/entropy (of the policy now if `needs_entropy`, else -rollout_log_probs: the sampled
        estimate for the policy that sampled), if used policy/ref_kl and policy/tis_weight; policy/ratio_deviation_max, of |ratio - 1|.
        """
        from megarl.kernels.aggregate import token_weights
        from megarl.kernels.kl import kl_estimate
        from megarl.kernels.policy_loss import policy_loss
        n = inputs.num_tokens
        weights = token_weights(self.loss_aggregation, inputs.response_lengths, n, inputs.num_sequences, inputs.max_response_length)
        metrics, policy_weights = {}, weights
        if self.tis_clip is not None:
            tis = (inputs.old_log_probs - inputs.rollout_log_probs).clamp(max=math.log(self.tis_clip)).exp()
            policy_weights, metrics["policy/tis_weight"] = weights * tis, tis.sum() / n
        loss, stats = policy_loss(inputs.log_probs, inputs.old_log_probs, inputs.advantages, policy_weights,
                                  clip_eps_low=self.clip_eps_low, clip_eps_high=self.clip_eps_high, clip_ratio_c=self.clip_ratio_c)
        if self.needs_reference:
            ref_kl = kl_estimate(inputs.log_probs, inputs.ref_log_probs, self.kl_estimator)
            metrics["policy/ref_kl"] = ref_kl.detach().sum() / n
            if self.kl_mode == "loss":
                loss = loss + self.kl_coef * (weights * ref_kl).sum()
        entropy = inputs.entropy if self.needs_entropy else -inputs.rollout_log_probs
        if self.needs_entropy:
            loss = loss - self.entropy_coef * (weights * entropy).sum()
        return loss, metrics | {
            "policy/loss": loss.detach(), "policy/clip_fraction": stats.num_clipped / n, "policy/kl": stats.kl_sum / n,
            "policy/dual_clip_fraction": stats.num_dual_clipped / n, "policy/entropy": entropy.detach().sum() / n,
            "policy/ratio_deviation_max": stats.ratio_deviation_max}
