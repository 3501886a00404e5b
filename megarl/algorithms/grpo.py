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

    policy_loss: Literal["ppo", "cispo"] = "ppo"
    """ppo: a clipped token has no gradient. cispo: the clip only bounds the ratio that weighs a token's gradient."""
    clip_eps_low: float = 0.2
    """The policy ratio is clipped at 1 - this."""
    clip_eps_high: float = 0.2
    """The policy ratio is clipped at 1 + this."""
    clip_ratio_c: float | None = None
    """Dual clip of ppo: bound of the ratio where the advantage is negative, above 1, e.g. 3. Default: none."""
    normalize_advantages_by_std: bool = True
    """Divide the advantages by the standard deviation of their group's rewards."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"] = "token-mean"
    """token-mean: tokens count the same. seq-mean-*: sequences do, by their tokens' mean or sum. dr-grpo: sum / --max-response-length."""
    kl_mode: Literal["none", "loss", "reward"] = "none"
    """Where the KL to the reference policy is counted: nowhere, in the loss, or taken off each response's reward."""
    kl_coef: float = 0.0
    """Factor of that KL; above 0 unless --kl-mode none."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    """KL estimate per token. k1 is meant for --kl-mode reward: in the loss its gradient is zero on average, so it holds nothing back."""
    kl_straight_through: bool = False
    """In the loss, give every estimate the gradient of k2, which is that of the KL."""
    entropy_coef: float = 0.0
    """Factor of the mean entropy, which is subtracted from the loss."""
    tis_clip: float | None = None
    """Truncated importance sampling: each token's loss is weighted by min(trainer's probability / engine's, this). Default: none."""

    def __post_init__(self) -> None:
        require(self, at_least={"clip_eps_low": 0, "clip_eps_high": 0, "kl_coef": 0}, at_most={"clip_eps_low": 1},
                above={"clip_ratio_c": 1, "tis_clip": 0, "entropy_coef": -math.inf}, below={"kl_coef": math.inf, "entropy_coef": math.inf},
                rules=[(self.policy_loss in ("ppo", "cispo"), "policy_loss", "must be ppo or cispo."),
                       (self.kl_mode in ("none", "loss", "reward"), "kl_mode", "must be none, loss or reward."),
                       ((self.kl_mode == "none") == (self.kl_coef == 0), "kl_coef",
                        f"must be 0 with --kl-mode none, and above 0 with loss or reward, e.g. 0.001. --kl-mode is {self.kl_mode}."),
                       (not self.kl_straight_through or self.kl_mode == "loss", "kl_straight_through", "needs --kl-mode loss."),
                       (self.policy_loss != "cispo" or self.clip_ratio_c is None, "clip_ratio_c", "is not for --policy-loss cispo.")])

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

        Metrics: policy/loss; per-token means policy/clip_fraction (the clip took the gradient away; cispo: bounded it), policy/kl
        (k3 of KL(old || now)), policy/dual_clip_fraction, policy/entropy (without `needs_entropy` -rollout_log_probs, the sampled
        estimate for the engine), if used policy/ref_kl and policy/tis_weight; policy/ratio_deviation_max, of |ratio - 1|.
        """
        from megarl.kernels.aggregate import token_weights
        from megarl.kernels.policy_loss import PolicyLossOptions, policy_loss
        n = inputs.num_tokens
        loss, stats = policy_loss(
            inputs.log_probs, inputs.old_log_probs, inputs.advantages,
            token_weights(self.loss_aggregation, inputs.response_lengths, n, inputs.num_sequences, inputs.max_response_length),
            PolicyLossOptions(
                kind=self.policy_loss, clip_eps_low=self.clip_eps_low, clip_eps_high=self.clip_eps_high, clip_ratio_c=self.clip_ratio_c,
                tis_clip=self.tis_clip, kl_coef=self.kl_coef if self.kl_mode == "loss" else 0.0, kl_estimator=self.kl_estimator,
                kl_straight_through=self.kl_straight_through, entropy_coef=self.entropy_coef),
            rollout_log_probs=inputs.rollout_log_probs, ref_log_probs=inputs.ref_log_probs if self.needs_reference else None,
            entropy=inputs.entropy if self.needs_entropy else -inputs.rollout_log_probs)  # fmt: skip
        totals = {"clip_fraction": stats.num_clipped, "dual_clip_fraction": stats.num_dual_clipped, "kl": stats.kl_sum,
                  "entropy": stats.entropy_sum, "ref_kl": stats.ref_kl_sum, "tis_weight": stats.tis_weight_sum}  # fmt: skip
        metrics = {f"policy/{name}": total / n for name, total in totals.items() if total is not None}
        return loss, metrics | {"policy/loss": loss.detach(), "policy/ratio_deviation_max": stats.ratio_deviation_max}
