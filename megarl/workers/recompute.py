"""Recompute the advantages of a few samples by the algorithm's slow reference, at every step and on every
rank, to find errors.

Digests cannot find a fault inside the computation: advantages in reversed order are written and moved as
faithfully as right ones. Each rank therefore draws its own samples, looks everything up by their ids, and
compares the numbers with those in the columns."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from megarl.algorithms.base import Algorithm, ReferenceColumn, ReferenceInputs
from megarl.algorithms.reference_inputs import rounded_to_fp32
from megarl.algorithms.several_scores import StepScores
from megarl.algorithms.turn_rewards import TurnRewards
from megarl.batch import Batch
from megarl.invariants import InvariantError

NUM_TOKENS = 256
"""Number of values after which a rank begins no further group.

A rank recomputes all groups of a small step, and one group of a large step."""
_ROUNDING = 16 * torch.finfo(torch.float32).eps
"""Allowed difference relative to the size of the terms of a sum.

It covers some ten operations in fp32, and a scan in another order than the reference's."""


def check_advantages(
    algorithm: Algorithm,
    batch: Batch,
    rewards: Mapping[int, float],
    group_of: Mapping[int, int],
    kl_coef: float,
    lengths_of_all: Mapping[int, int],
    seed: str,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
    turns: Mapping[int, TurnRewards | None] | None = None,
    scores: StepScores | None = None,
    untrained: frozenset[int] = frozenset(),
    episode_of: Mapping[int, int] | None = None,
) -> None:
    """Recompute advantages of some samples on this rank, and raise InvariantError if the stored columns
    differ by more than rounding.

    Collective over the ranks of `sum_over_ranks`, if the algorithm needs sums.

    Args:
        rewards, group_of: sample id -> reward and group, of all samples of the step in the same order on
            every rank. Groups may have any sizes.
        lengths_of_all: sample id -> response tokens, of all samples of the step.
        seed: the same seed chooses the same samples.
        turns: with --turn-rewards sample id -> its answers; None where the reward failed.
        scores: if the algorithm takes scores, those of all samples, in the order of `rewards`.
        untrained: samples that are scored and not trained on.
        episode_of: further samples of episodes on this rank -> the episode, under which the mappings have it.
    Raises: InvariantError with sample, expected and found value."""
    if not _has_reference(algorithm):
        return
    rewards = {sample: rounded_to_fp32(reward) for sample, reward in rewards.items()}
    groups: dict[int, list[int]] = {}
    for sample, group in group_of.items():
        groups.setdefault(group, []).append(sample)
    here, lengths, parts = batch.sample_ids.tolist(), batch.response_lengths.tolist(), {}

    def column(sample: int, name: str) -> torch.Tensor:
        if name not in parts:
            parts[name] = dict(
                zip(here, getattr(batch, name)[batch.response_mask].split(lengths), strict=True)
            )
        return parts[name][sample]

    inputs = ReferenceInputs(
        rewards=rewards,
        positions={s: i for i, s in enumerate(rewards)},
        columns=column,
        kl_coef=kl_coef,
        lengths=lengths_of_all,
        groups={s: groups[g] for s, g in group_of.items()},
        samples=here,
        turns=turns,
        scores=scores,
        untrained=untrained,
        episode_of=episode_of or {},
    )
    if (sums := algorithm.reference_sums(inputs)) is not None:
        inputs = replace(inputs, sums=sum_over_ranks(torch.tensor(sums, dtype=torch.float64)).tolist())
    num_left = NUM_TOKENS
    for samples in _draw({s: group_of[inputs.episode(s)] for s in here}, seed):
        if num_left <= 0:
            return
        for sample in samples:
            expected = algorithm.reference_advantages(inputs, sample)
            if expected is None:
                return
            for name, reference in expected.items():
                reward = rewards[inputs.episode(sample)]
                num_left -= _compare(sample, name, reference, column(sample, name).tolist(), reward)


def _has_reference(algorithm: Algorithm) -> bool:
    """Return whether the algorithm's reference is of its own advantages.

    It is not where a subclass has replaced the advantages alone."""

    def defined_in(*methods: str) -> type:
        return next(cls for cls in type(algorithm).__mro__ if any(name in vars(cls) for name in methods))

    computing = defined_in("compute_advantages", "step_advantages", "sample_advantages")
    return issubclass(defined_in("reference_advantages", "reference_advantage"), computing)


def _draw(group_of: Mapping[int, int], seed: str) -> list[list[int]]:
    """Return the ids of the samples on this rank as one list per group, the groups in a random order.

    Args:
        group_of: sample on this rank -> its group."""
    samples_of: dict[int, list[int]] = {}
    for sample, group in sorted(group_of.items()):
        samples_of.setdefault(group, []).append(sample)
    order = sorted(samples_of)
    random.Random(seed).shuffle(order)
    return [samples_of[group] for group in order]


def _compare(
    sample: int, name: str, reference: ReferenceColumn, found: Sequence[float], reward: float
) -> int:
    """Return the number of tokens compared, or raise InvariantError if a sample's column differs from its
    reference by more than rounding."""
    for position, (value, wanted, magnitude) in enumerate(
        zip(found, reference.values, reference.magnitudes, strict=True)
    ):
        both_are_nan = math.isnan(value) and math.isnan(wanted)
        # also raises if only one is NaN
        if not both_are_nan and not abs(value - wanted) <= _ROUNDING * magnitude:
            raise InvariantError(
                f"{name} of sample {sample} (reward {reward:g}) is {value:.7g} at response token "
                f"{position}, and its reference says "
                f"{wanted:.7g}: it is not what the algorithm makes of this sample's reward"
            )
    return len(found)
