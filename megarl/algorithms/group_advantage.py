"""Define the base class of algorithms with one advantage per response, computed from the rewards of its
prompt's group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from megarl.algorithms.base import AdvantageInputs, ReferenceColumn, ReferenceInputs, advantage_metrics
from megarl.algorithms.policy_gradient import PolicyGradient
from megarl.algorithms.reference_kl import kl_costs, reference_kl

if TYPE_CHECKING:
    from torch import Tensor


class Peer(NamedTuple):
    """One response of a group, with the values that `reference_advantage` needs."""

    reward: float
    """Finite; after KL and length penalty are taken off."""
    length: int
    """Response tokens."""
    is_trained: bool = True
    """False for a response that is scored and not trained on."""


class GroupStatistics(NamedTuple):
    """Sums over the members of a group whose reward did not fail, one number per sample of the step."""

    is_valid: Tensor
    """[S] bool, whether the sample's reward did not fail."""
    rewards: Tensor
    """[S] fp64, 0 where the reward failed."""
    count: Tensor
    """[S] fp64, valid members of the sample's group."""
    group: Tensor
    """[S] int64, the group's number, from 0."""

    @staticmethod
    def of(rewards: Tensor, group_ids: Tensor) -> GroupStatistics:
        is_valid = ~rewards.isnan()
        group = group_ids.unique(return_inverse=True)[1]
        of_valid = rewards.double().where(is_valid, rewards.new_zeros((), dtype=rewards.double().dtype))
        found = GroupStatistics(is_valid, of_valid, of_valid, group)
        return found._replace(count=found.total(is_valid.double()))

    def total(self, per_sample: Tensor) -> Tensor:
        """Return, for each sample, the sum of [S] numbers over its group. Failed samples must hold 0."""
        return per_sample.new_zeros(len(per_sample)).index_add(0, self.group, per_sample)[self.group]


def places_in_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return [S] int64, the place of each sample in its group by its reward, from 0 for the largest. Of equal
    rewards the first sample comes first, and failed rewards (NaN) come last."""
    import torch

    group = group_ids.unique(return_inverse=True)[1]
    best_first = rewards.double().nan_to_num(nan=-math.inf).neg().argsort(stable=True)
    order = best_first[group[best_first].argsort(stable=True)]
    counts = torch.bincount(group)
    places = torch.empty_like(group)
    places[order] = torch.arange(len(group)) - (counts.cumsum(0) - counts)[group[order]]
    return places


def normalized_in_group(mine: float, group: Sequence[float], by_std: bool = True) -> tuple[float, float]:
    """Return (mine - mean of the group) / (standard deviation + 1e-4) by plain arithmetic, and what it was divided by.

    Args:
        group: two or more numbers, including `mine`.
        by_std: False divides by 1."""
    mean, scale = math.fsum(group) / len(group), 1.0
    if by_std:
        scale = math.sqrt(math.fsum((one - mean) ** 2 for one in group) / (len(group) - 1)) + 1e-4
    return (mine - mean) / scale, scale


def rounded_size(advantage: float, scale: float, largest: float) -> float:
    """Return the size of the terms of an advantage for `ReferenceColumn`.

    Args:
        scale: what the reward was divided by.
        largest: size of the group's largest reward."""
    # Rewards are rounded to fp32, which moves each deviation, and what it is divided by.
    return largest / scale * (1 + abs(advantage)) + abs(advantage)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAdvantage(PolicyGradient):
    """one advantage per response, from its group's rewards"""

    relative_to_group: ClassVar[bool] = True

    def sample_advantages(self, rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the [S] fp32 advantage of each sample of the step; 0 where the reward failed (NaN).

        Args:
            lengths: [S] int64, response tokens of each sample."""
        raise NotImplementedError

    def step_advantages(self, inputs: AdvantageInputs, rewards: Tensor) -> Tensor:
        """Return the [S] fp32 advantages as `sample_advantages` does, for an algorithm that reads more than
        its arguments.

        Args:
            rewards: [S] fp32, less the KL with kl_mode reward."""
        return self.sample_advantages(rewards, inputs.group_ids, inputs.sample_lengths)

    def reference_advantage(self, mine: Peer, group: Sequence[Peer]) -> tuple[float, float]:
        """Return one sample's advantage by plain arithmetic, and the number by which its reward was divided.

        Args:
            group: members of the group whose reward did not fail, two or more, including `mine`."""
        raise NotImplementedError

    def compute_advantages(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return each sample's advantage within its group, on all of its tokens, and metrics. Needs one sum
        over ranks with kl_mode reward, else none.

        Metrics: advantage/max_abs, reward/failed, with a reference kl/per_response and kl/coef.
        """
        kl, metrics = reference_kl(self, inputs)
        rewards = inputs.rewards
        if self.kl_mode == "reward":
            rewards = rewards - (inputs.kl_coef * inputs.sum_per_sample(kl)).to(rewards.dtype)
        of_samples = self.step_advantages(inputs, rewards)
        advantages = inputs.spread(of_samples)
        return {"advantages": advantages}, metrics | advantage_metrics(inputs, advantages)

    def reference_sums(self, inputs: ReferenceInputs) -> list[float] | None:
        """Return the KL penalty of every sample of the step, then the sizes of the terms of these sums; None
        unless kl_mode is reward."""
        if self.kl_mode != "reward":
            return None
        lengths = [len(inputs.columns(sample, "advantages")) for sample in inputs.samples]
        sums: list[float] = []
        for per_token in kl_costs(self, inputs, inputs.samples):
            here = dict.fromkeys(inputs.rewards, 0.0)
            for sample, part in zip(inputs.samples, per_token.split(lengths), strict=True):
                here[inputs.episode(sample)] += float(part.sum())
            sums += here.values()
        return sums

    def reference_advantages(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn]:
        """Return one sample's advantage on each of its tokens, by `reference_advantage`; 0 without a valid
        peer."""
        num_tokens, count = len(inputs.columns(sample, "advantages")), len(inputs.rewards)
        episode = inputs.episode(sample)
        sums = inputs.sums or [0.0] * 2 * count
        found: dict[int, Peer] = {}
        sizes = []
        for member in inputs.groups[episode]:
            at = inputs.positions[member]
            if not math.isnan(inputs.rewards[member]):
                reward = inputs.rewards[member] - sums[at]
                found[member] = Peer(reward, inputs.lengths[member], member not in inputs.untrained)
                sizes.append(abs(inputs.rewards[member]) + sums[count + at])
        if episode not in found or len(found) == 1:
            return {"advantages": ReferenceColumn.constant(num_tokens)}
        advantage, scale = self.reference_advantage(found[episode], list(found.values()))
        magnitude = rounded_size(advantage, scale, max(sizes))
        return {"advantages": ReferenceColumn.constant(num_tokens, advantage, magnitude)}
