"""Generalized advantage estimation (GAE, arXiv:1506.02438) of the samples of a step: by the kernel for all tokens of
a rank, and for one sample a token at a time, as the reference that the kernel's numbers are compared with.

    A(t) = r(t) + gamma V(t + 1) - V(t) + gamma lambda A(t + 1)        V(T) = A(T) = 0

r(t) is -kl_coef KL(t), if the KL is counted in the reward, plus the sample's reward on its last token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from megarl.algorithms.base import AdvantageInputs, ReferenceColumn, ReferenceInputs
from megarl.algorithms.reference_kl import ReferenceKLFlags, kl_costs, reference_kl
from megarl.algorithms.whitening import sums_for_whitening, whitened_reference

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.kernels.gae import GAE


class Decays(NamedTuple):
    """Decays of GAE: those of the policy's advantages and of the returns that the critic learns."""

    gamma: float
    """Discount of rewards per token, of both."""
    of_critic: float
    """Lambda of the returns (VC-PPO, arXiv:2503.01491)."""
    of_policy: float
    """Lambda of the advantages."""
    alpha: float | None
    """In place of `of_policy`: lambda is 1 - 1 / (alpha x tokens of the response) (VAPO, arXiv:2504.05118, eq. 9)."""

    @property
    def are_equal(self) -> bool:
        """Whether the returns are the values plus the policy's advantages."""
        return self.alpha is None and self.of_critic == self.of_policy

    def policy_lambda(self, length: int) -> float:
        """Return lambda of the advantages of a response of `length` tokens."""
        if self.alpha is None:
            return self.of_policy
        return max(1 - 1 / (self.alpha * length), 0.0) if length else 0.0


class KLInRewardFlags(ReferenceKLFlags, Protocol):
    """The fields of an algorithm that decide what the KL takes off the reward of each token."""

    kl_mode: str


class GAEFlags(KLInRewardFlags, Protocol):
    """The fields of an algorithm that the references of its advantages read beside the decays."""

    whiten_advantages: bool


def token_rewards(
    flags: KLInRewardFlags, inputs: AdvantageInputs, rewards: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Return the [N] fp32 reward of each token of this rank, and the metrics of `reference_kl`.

    Args:
        rewards: [S] fp32, one for each episode of the step."""
    import torch

    kl, metrics = reference_kl(flags, inputs)
    lengths = inputs.response_lengths
    if flags.kl_mode == "reward":
        of_tokens = -inputs.kl_coef * kl
    else:
        of_tokens = torch.zeros(int(lengths.sum()), device=rewards.device)
    has_tokens = lengths > 0
    of_tokens[lengths.cumsum(0)[has_tokens] - 1] += rewards[inputs.rows][has_tokens]
    return of_tokens, metrics


def step_gae(
    inputs: AdvantageInputs, rewards: Tensor, values: Tensor, gamma: float, gae_lambda: float | Tensor
) -> GAE:
    """Return advantages, returns and their sums of this rank's samples; 0 where the reward failed.

    Args:
        rewards: [N], of `token_rewards`.
        gae_lambda: one for all samples, or [B], one for each."""
    import torch

    from megarl.kernels.gae import gae

    ends = inputs.response_lengths.cumsum(0)
    is_scored = inputs.spread(~inputs.rewards.isnan())
    places = torch.cat([ends.new_zeros(1), ends])
    return gae(rewards, values, is_scored, places, gamma=gamma, gae_lambda=gae_lambda)


def policy_and_critic_gae(inputs: AdvantageInputs, rewards: Tensor, decays: Decays) -> tuple[GAE, GAE]:
    """Return `step_gae` with the policy's lambda and with the critic's.

    Raises: ValueError for an infinite reward."""
    import torch

    if bool((is_infinite := inputs.rewards.isinf()).any()):
        index = int(is_infinite.nonzero()[0])
        reward = inputs.rewards[index].item()
        raise ValueError(f"rewards[{index}] ({reward}) must be finite, or NaN for a failed sample")
    of_critic = step_gae(inputs, rewards, inputs.values, decays.gamma, decays.of_critic)
    if decays.are_equal:
        return of_critic, of_critic
    of_policy: float | Tensor = decays.of_policy
    if decays.alpha is not None:
        of_policy = torch.tensor(
            [decays.policy_lambda(length) for length in inputs.response_lengths.tolist()]
        )
    return step_gae(inputs, rewards, inputs.values, decays.gamma, of_policy), of_critic


def gae_sums(flags: GAEFlags, decays: Decays, inputs: ReferenceInputs) -> list[float] | None:
    """Return sum, sum of squares and count of this rank's advantages before whitening; None without whitening."""
    if not flags.whiten_advantages:
        return None
    samples = filter(inputs.has_reward, inputs.samples)
    if decays.are_equal:  # the advantages are returns - values: no need of a loop over all tokens
        import torch

        parts = (inputs.columns(one, "returns").double() - inputs.columns(one, "values") for one in samples)
        column = torch.cat([torch.zeros(0, dtype=torch.float64), *parts])
        return [float(column.sum()), float(column.square().sum()), float(len(column))]
    return sums_for_whitening(_policy_reference(flags, decays, inputs, one).values for one in samples)


def gae_columns(
    flags: GAEFlags, decays: Decays, inputs: ReferenceInputs, sample: int
) -> dict[str, ReferenceColumn]:
    """Return advantages and returns of one sample, computed a token at a time."""
    values, reward = inputs.columns(sample, "values").tolist(), inputs.rewards[inputs.episode(sample)]
    if not inputs.has_reward(sample):
        nothing = ReferenceColumn.constant(len(values))
        returns = ReferenceColumn(values=[math.nan] * len(values), magnitudes=nothing.magnitudes)
        return {"advantages": nothing, "returns": returns}
    of_critic = reference_gae(flags, inputs, sample, reward, values, decays.gamma, decays.of_critic)
    returns = ReferenceColumn(
        values=[advantage + value for advantage, value in zip(of_critic.values, values, strict=True)],
        magnitudes=of_critic.magnitudes,
    )
    advantages = _policy_reference(flags, decays, inputs, sample)
    if flags.whiten_advantages:
        advantages = whitened_reference(advantages, inputs.sums)
    return {"advantages": advantages, "returns": returns}


def _policy_reference(
    flags: GAEFlags, decays: Decays, inputs: ReferenceInputs, sample: int
) -> ReferenceColumn:
    """Return the policy's advantages of a sample with a reward, before whitening."""
    values, reward = inputs.columns(sample, "values").tolist(), inputs.rewards[inputs.episode(sample)]
    gae_lambda = decays.policy_lambda(len(values))
    return reference_gae(flags, inputs, sample, reward, values, decays.gamma, gae_lambda)


def reference_gae(
    flags: KLInRewardFlags,
    inputs: ReferenceInputs,
    sample: int,
    reward: float,
    values: Sequence[float],
    gamma: float,
    gae_lambda: float,
) -> ReferenceColumn:
    """Return one sample's advantages, computed a token at a time from its end.

    Args:
        reward: what the last token gets.
        values: [n], of the critic; 0 without one."""
    n, decay, last_reward = len(values), gamma * gae_lambda, reward
    costs = sizes = [0.0] * n
    if flags.kl_mode == "reward":
        parts = kl_costs(flags, inputs, [sample])
        costs, sizes = (of_tokens.tolist() for of_tokens in parts)
    advantages, magnitudes = [0.0] * n, [0.0] * n
    advantage = magnitude = next_value = 0.0
    for t in reversed(range(n)):
        delta = last_reward - costs[t] + gamma * next_value - values[t]
        advantage = delta + decay * advantage
        terms = abs(last_reward) + sizes[t] + gamma * abs(next_value) + abs(values[t])
        magnitude = terms + decay * magnitude
        next_value, last_reward = values[t], 0.0
        advantages[t], magnitudes[t] = advantage, magnitude
    return ReferenceColumn(values=advantages, magnitudes=magnitudes)
