"""Collect what an algorithm computes advantages from, on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from megarl.algorithms.base import AdvantageInputs, algorithm_of
from megarl.algorithms.several_scores import StepScores, scores_of_step
from megarl.algorithms.turn_rewards import TurnRewards, turn_rewards_of
from megarl.config.schema import TrainConfig
from megarl.flow.columns import COMPUTED_COLUMNS
from megarl.flow.job_roles import Actor
from megarl.workers.store import BatchLayout, BatchShard

ADVANTAGE_COLUMNS = tuple(name for name in Actor.advantages.reads if name in COMPUTED_COLUMNS)
"""Token columns that an algorithm may compute advantages from."""


def given_turns(
    config: TrainConfig,
    sample_ids: Sequence[int],
    given: Sequence[float | None],
    lengths: Sequence[int],
    turn_rewards: list[list[float]] | None,
    turn_lengths: list[list[int]] | None,
) -> list[TurnRewards | None] | None:
    """Return the answers of each episode as `turn_rewards_of` does; None without --turn-rewards.

    Raises: ValueError as it, and if the job has --turn-rewards and none are given."""
    if turn_rewards is not None:
        return turn_rewards_of(sample_ids, given, lengths, turn_rewards, turn_lengths)
    if config.episodes.turn_rewards:
        raise ValueError(
            "advantages: the job has --turn-rewards, and gets none. Pass *batch.turns behind the digests, or leave "
            "the flag out."
        )
    return None


def given_scores(
    config: TrainConfig,
    sample_ids: Sequence[int],
    group_ids: Sequence[int],
    given: Sequence[float | None],
    scores: Mapping[str, Sequence[float | None]],
    weights: Mapping[str, float],
    multiplier: float | None,
) -> StepScores | None:
    """Return the single scores as `scores_of_step` does; None if the algorithm takes none.

    Raises: ValueError as it, and if the algorithm weighs costs with a multiplier and gets none."""
    algorithm = algorithm_of(config)
    if multiplier is None and algorithm.build_multiplier() is not None:
        raise ValueError(
            "advantages: the algorithm weighs costs with a multiplier, and gets none. Pass multiplier=, or call "
            "trainer.update(batch), which gives its own."
        )
    if not algorithm.takes_scores:
        return None
    return scores_of_step(sample_ids, group_ids, given, scores, weights, multiplier)


def advantage_inputs(
    shard: BatchShard,
    layout: BatchLayout,
    sample_ids: Sequence[int],
    group_ids: Sequence[int],
    given: Sequence[float | None],
    rewards: Sequence[float | None],
    kl_coef: float,
    turns: Sequence[TurnRewards | None] | None,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
) -> AdvantageInputs:
    """Return the inputs of `compute_advantages` on this rank.

    Args:
        shard: the rank's samples.
        layout: records of all samples of the step.
        sample_ids: all episodes of the step, by their first samples; `group_ids`, `given` and `rewards` in
            the same order.
        given, rewards: before and after shaping."""
    batch, row_of = shard.batch, {sample: row for row, sample in enumerate(sample_ids)}
    here = [layout.samples[sample] for sample in batch.sample_ids.tolist()]
    untrained = [not layout.samples[sample].trained for sample in sample_ids]
    branches = torch.tensor([sample.branch for sample in here], dtype=torch.int64)
    number_of = {
        sample: number
        for number, mini_batch in enumerate(shard.mini_batches)
        for dp_rank in range(len(mini_batch.micro_batches))
        for sample in mini_batch.samples_of(dp_rank)
    }
    return AdvantageInputs(
        rewards=_numbers(rewards),
        given_rewards=_numbers(given),
        group_ids=torch.tensor(group_ids),
        # A rank without samples would otherwise get a float tensor.
        rows=torch.tensor([row_of[sample.episode] for sample in here], dtype=torch.int64),
        branches=branches if layout.has_branches else None,
        response_lengths=batch.response_lengths,
        kl_coef=kl_coef,
        sum_over_ranks=sum_over_ranks,
        sample_lengths=torch.tensor([layout.episode_lengths[sample] for sample in sample_ids]),
        is_untrained=torch.tensor(untrained) if any(untrained) else None,
        mini_batches=torch.tensor([number_of.get(sample, -1) for sample in sample_ids]),
        turns=turns,
        **{
            name: column[batch.response_mask]
            for name, column in batch.columns.items()
            if name in (*ADVANTAGE_COLUMNS, "rollout_log_probs")
        },
    )


def _numbers(rewards: Sequence[float | None]) -> torch.Tensor:
    """Return the rewards as a tensor, with NaN for those that failed."""
    return torch.tensor([math.nan if reward is None else reward for reward in rewards])
