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

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megarl.algorithms.base import (
    AdvantageInputs,
    ReferenceColumn,
    ReferenceInputs,
    ValueLossInputs,
    advantage_metrics,
)
from megarl.algorithms.policy_gradient import PolicyGradient
from megarl.algorithms.whitening import sums_for_whitening, whitened_reference
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
        tokens of samples with a reward critic/value_mean, critic/return_mean and critic/explained_variance: 1
        - variance of (returns - values) / variance of returns, before the updates; 0 where the returns are
        equal but for rounding.
        Raises: ValueError for an infinite reward.
        """
        import torch

        from megarl.kernels.gae import gae, whiten

        if bool(inputs.rewards.isinf().any()):
            index = int(inputs.rewards.isinf().nonzero()[0])
            raise ValueError(
                f"rewards[{index}] ({inputs.rewards[index].item()}) must be finite, or NaN for a "
                "failed sample"
            )
        values, lengths, rewards = inputs.values, inputs.response_lengths, inputs.rewards[inputs.rows]
        kl, metrics = self._reference_kl(inputs)
        token_rewards = -inputs.kl_coef * kl if self.kl_mode == "reward" else torch.zeros_like(values)
        ends, has_tokens = lengths.cumsum(0), lengths > 0
        token_rewards[ends[has_tokens] - 1] += rewards[has_tokens]
        is_scored = inputs.spread(~inputs.rewards.isnan())
        columns = token_rewards, values, is_scored, torch.cat([ends.new_zeros(1), ends])
        of_critic = gae(*columns, gamma=self.gamma, gae_lambda=self._critic_lambda)
        of_policy = of_critic
        if self._is_decoupled:
            decay: float | Tensor = self.gae_lambda
            if self.gae_lambda_alpha is not None:
                decay = torch.tensor([self._policy_lambda(length) for length in lengths.tolist()])
            of_policy = gae(*columns, gamma=self.gamma, gae_lambda=decay)
        sums = [x for column in (of_critic.returns, values) for x in _sums(column[is_scored])]
        stats = inputs.sum_over_ranks(torch.cat([of_policy.stats, of_critic.stats, torch.stack(sums)]))
        advantages = of_policy.advantages
        if self.whiten_advantages:
            advantages = whiten(advantages, is_scored, stats[:3])
        of_step = _critic_metrics(int(is_scored.sum()), *stats[3:].tolist())
        metrics |= advantage_metrics(inputs, advantages) | of_step
        returns = torch.where(is_scored, of_critic.returns, torch.nan)
        return {"advantages": advantages, "returns": returns}, metrics

    @property
    def _critic_lambda(self) -> float:
        return self.gae_lambda if self.critic_gae_lambda is None else self.critic_gae_lambda

    @property
    def _is_decoupled(self) -> bool:
        """Whether the policy's advantages and the critic's returns are computed with different decays (lambda
        of GAE)."""
        return self.gae_lambda_alpha is not None or self._critic_lambda != self.gae_lambda

    def _policy_lambda(self, length: int) -> float:
        """Return the decay of the advantages of a response of `length` tokens (arXiv:2504.05118, eq. 9)."""
        if self.gae_lambda_alpha is None:
            return self.gae_lambda
        return max(1 - 1 / (self.gae_lambda_alpha * length), 0.0) if length else 0.0

    def reference_sums(self, inputs: ReferenceInputs) -> list[float] | None:
        """Return sum, sum of squares and count of this rank's advantages before whitening, for the plain
        reference computation that checks one group per step; None without whitening.

        These advantages are returns - values, unless policy and critic have different decays."""
        if not self.whiten_advantages:
            return None
        if self._is_decoupled:
            of_samples = (self._policy_reference(inputs, sample)[0] for sample in inputs.samples)
            return sums_for_whitening(value for advantages in of_samples for value in advantages)
        import torch

        empty = [torch.zeros(0)]
        returns, values = (
            torch.cat(empty + [inputs.columns(s, name) for s in inputs.samples]).double()
            for name in ("returns", "values")
        )
        advantages = (returns - values)[~returns.isnan()]
        return [float(advantages.sum()), float(advantages.square().sum()), float(len(advantages))]

    def reference_advantages(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn]:
        """Return advantages and returns of one sample by GAE, computed a token at a time from its end."""
        values, reward = inputs.columns(sample, "values").tolist(), inputs.rewards[inputs.episode(sample)]
        n = len(values)
        if math.isnan(reward):
            nothing = [0.0] * n
            return {
                "advantages": ReferenceColumn(values=nothing, magnitudes=nothing),
                "returns": ReferenceColumn(values=[math.nan] * n, magnitudes=nothing),
            }
        of_critic, magnitudes = self._reference_gae(inputs, sample, self._critic_lambda)
        returns = [advantage + value for advantage, value in zip(of_critic, values)]
        found = {"returns": ReferenceColumn(values=returns, magnitudes=magnitudes)}
        advantages, magnitudes = self._policy_reference(inputs, sample)
        if self.whiten_advantages:
            return {"advantages": whitened_reference(advantages, magnitudes, inputs.sums)} | found
        return {"advantages": ReferenceColumn(values=advantages, magnitudes=magnitudes)} | found

    def _policy_reference(self, inputs: ReferenceInputs, sample: int) -> tuple[list[float], list[float]]:
        """Return one sample's advantages before whitening, and the sizes of their terms; two empty lists if
        its reward failed."""
        if math.isnan(inputs.rewards[inputs.episode(sample)]):
            return [], []
        length = len(inputs.columns(sample, "values"))
        return self._reference_gae(inputs, sample, self._policy_lambda(length))

    def _reference_gae(
        self, inputs: ReferenceInputs, sample: int, gae_lambda: float
    ) -> tuple[list[float], list[float]]:
        """Return one sample's advantages by GAE, computed a token at a time from its end, and the sizes of
        their terms."""
        values = inputs.columns(sample, "values").tolist()
        last_reward = inputs.rewards[inputs.episode(sample)]
        n, decay = len(values), self.gamma * gae_lambda
        costs = sizes = [0.0] * n
        if self.kl_mode == "reward":
            costs, sizes = (per_token.tolist() for per_token in self._reference_kl_costs(inputs, [sample]))
        advantages, magnitudes = [0.0] * n, [0.0] * n
        advantage = magnitude = next_value = 0.0
        for t in reversed(range(n)):
            delta = last_reward - costs[t] + self.gamma * next_value - values[t]
            advantage = delta + decay * advantage
            terms = abs(last_reward) + sizes[t] + self.gamma * abs(next_value) + abs(values[t])
            magnitude = terms + decay * magnitude
            next_value, last_reward = values[t], 0.0
            advantages[t], magnitudes[t] = advantage, magnitude
        return advantages, magnitudes

    def value_loss(self, inputs: ValueLossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return max((values - returns)^2, (values clipped to old_values +- value_clip_eps - returns)^2) / 2,
        averaged by loss_aggregation, and metrics.

        Metrics: critic/loss; critic/clip_fraction, of tokens, whose gradient the clip took away.
        """
        from megarl.kernels.aggregate import token_weights
        from megarl.kernels.value_loss import value_loss

        n = inputs.num_tokens
        weights = token_weights(
            self.loss_aggregation,
            inputs.response_lengths,
            n,
            inputs.num_sequences,
            inputs.max_response_length,
        )
        loss, stats = value_loss(
            inputs.values, inputs.old_values, inputs.returns, weights, clip_eps=self.value_clip_eps
        )
        return loss, {"critic/loss": loss.detach(), "critic/clip_fraction": stats.num_clipped / n}

    def value_weight_sum(self, num_tokens: int, num_sequences: int, max_response_length: int) -> float:
        from megarl.kernels.aggregate import total_weight

        return total_weight(self.loss_aggregation, num_tokens, num_sequences, max_response_length)


def _sums(column: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum and the sum of squares of a column, in fp64."""
    exact = column.double()
    return exact.sum(), exact.square().sum()


def _critic_metrics(
    num_here: int,
    advantage_sum: float,
    advantage_squares: float,
    count: float,
    return_sum: float,
    return_squares: float,
    value_sum: float,
    value_squares: float,
) -> dict[str, float]:
    """Return this rank's part of the critic's metrics, given sums over all ranks. The parts of all ranks add
    up to the metric.

    The advantages are returns - values."""
    if count == 0:
        return dict.fromkeys(("critic/value_mean", "critic/return_mean", "critic/explained_variance"), 0.0)
    unexplained, variance = (
        advantage_squares - advantage_sum**2 / count,
        return_squares - return_sum**2 / count,
    )
    # Returns are values plus advantages in fp32: equal ones differ by 1e-7 of either.
    explained = 0.0 if variance <= 1e-10 * (return_squares + value_squares) else 1 - unexplained / variance
    share = num_here / count
    return {
        "critic/value_mean": value_sum / count * share,
        "critic/return_mean": return_sum / count * share,
        "critic/explained_variance": explained * share,
    }
