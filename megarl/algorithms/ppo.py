"""Implement Proximal Policy Optimization (arXiv:1707.06347) of language models (InstructGPT,
arXiv:2203.02155), with a critic.

Of the response tokens t = 0 .. T - 1 of a sample, with the critic's values V(t), and V(T) = 0:

    r(t) = -kl_coef KL(t)  (--kl-mode reward)  + the sample's reward on the last token
    A(t) = r(t) + gamma V(t + 1) - V(t) + gamma gae_lambda A(t + 1)        return(t) = A(t) + V(t)        (GAE, arXiv:1506.02438)

A is whitened over all tokens of the step, on all ranks; the policy learns from it by the clipped loss, the
critic learns the returns by the value loss clipped around its values before the step.

A response that --max-response-length cut ends there like any other: its reward is on its last token, no value
is added for what it might have said. A sample whose reward failed teaches nothing: it is neither in the
whitening statistics nor in the losses, nor in what they are divided by.

With --critic-gae-lambda the critic learns returns of another decay than the policy's advantages (VC-PPO,
arXiv:2503.01491), and with --gae-lambda-alpha the policy's decay depends on the length of the response (VAPO,
arXiv:2504.05118).

Not as in InstructGPT, which is `--kl-mode reward --kl-estimator k1 --kl-coef 0.02`, with a mix of pretraining
gradients that is not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megarl.algorithms.aggregation import token_weights, total_weight
from megarl.algorithms.base import AdvantageInputs, ReferenceColumn, ReferenceInputs, ValueLossInputs
from megarl.algorithms.base import advantage_metrics
from megarl.algorithms.critic_metrics import critic_metrics, critic_sums
from megarl.algorithms.gae import Decays, gae_columns, gae_sums, policy_and_critic_gae, token_rewards
from megarl.algorithms.policy_gradient import PolicyGradient
from megarl.config.errors import Fraction, Natural, Positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PPO(PolicyGradient):
    """proximal policy optimization with a critic"""

    needs_critic: ClassVar[bool] = True
    paper: ClassVar[str] = "1707.06347"
    advantage_formula: ClassVar[str] = "GAE of a critic, whitened over the step"

    gamma: Fraction = 1.0
    """Discount of rewards per token."""
    gae_lambda: Fraction = 0.95
    """Decay of generalized advantage estimation per token: 1 trusts rewards alone, 0 the critic's next value
    alone."""
    critic_gae_lambda: Fraction | None = None
    """The decay of the returns that the critic learns, where the policy's is another (VC-PPO, VAPO: 1).
    Default: --gae-lambda."""
    gae_lambda_alpha: Positive | None = None
    """The policy's decay is 1 - 1 / (this x tokens of the response), so that the rewards of long responses
    reach their beginnings (VAPO: 0.05). At least 0; in place of --gae-lambda, which stays the critic's.
    Default: none."""
    whiten_advantages: bool = True
    """Give the advantages of each step mean 0 and variance 1 over all tokens."""
    value_clip_eps: Positive | None = 0.2
    """The critic learns nothing from a token whose value moved further than this from that before the step.
    none: no such clip."""
    critic_warmup_iters: Natural = 0
    """Number of first steps that update only the critic. The actor's learning-rate schedule begins then."""

    @property
    def advantage_reads(self) -> tuple[str, ...]:
        return (*super(PPO, self).advantage_reads, "values")

    def compute_advantages(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the columns advantages and returns by GAE, and this rank's part of the metrics, with one sum
        over ranks.

        Metrics: advantage/max_abs, reward/failed, with a reference kl/per_response and kl/coef, and of the
        tokens of samples with a reward those of `critic_metrics`, before the updates.
        Raises: ValueError for an infinite reward.
        """
        import torch

        from megarl.kernels.gae import whiten

        rewards, metrics = token_rewards(self, inputs, inputs.rewards)
        of_policy, of_critic = policy_and_critic_gae(inputs, rewards, self._decays)
        is_scored = inputs.spread(~inputs.rewards.isnan())
        measured = critic_sums(of_critic.returns[is_scored], inputs.values[is_scored])
        stats = inputs.sum_over_ranks(torch.cat([of_policy.stats, of_critic.stats, measured]))
        advantages = of_policy.advantages
        if self.whiten_advantages:
            advantages = whiten(advantages, is_scored, stats[:3])
        metrics |= advantage_metrics(inputs, advantages)
        metrics |= critic_metrics(int(is_scored.sum()), stats[3:6].tolist(), stats[6:].tolist())
        returns = torch.where(is_scored, of_critic.returns, torch.nan)
        return {"advantages": advantages, "returns": returns}, metrics

    @property
    def _decays(self) -> Decays:
        of_critic = self.gae_lambda if self.critic_gae_lambda is None else self.critic_gae_lambda
        return Decays(self.gamma, of_critic, self.gae_lambda, self.gae_lambda_alpha)

    def reference_sums(self, inputs: ReferenceInputs) -> list[float] | None:
        return gae_sums(self, self._decays, inputs)

    def reference_advantages(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn]:
        return gae_columns(self, self._decays, inputs, sample)

    def value_loss(self, inputs: ValueLossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return max((values - returns)^2, (values clipped to old_values +- value_clip_eps - returns)^2) / 2,
        averaged by loss_aggregation, and metrics.

        Metrics: critic/loss; critic/clip_fraction, of tokens, whose gradient the clip took away.
        """
        from megarl.kernels.value_loss import value_loss

        weights = token_weights(self.loss_aggregation, inputs)
        columns = inputs.values, inputs.old_values, inputs.returns, weights
        loss, stats = value_loss(*columns, clip_eps=self.value_clip_eps)
        clip_fraction = stats.num_clipped / inputs.num_tokens
        return loss, {"critic/loss": loss.detach(), "critic/clip_fraction": clip_fraction}

    def value_weight_sum(self, num_tokens: int, num_sequences: int, max_response_length: int) -> float:
        return total_weight(self.loss_aggregation, num_tokens, num_sequences, max_response_length)
