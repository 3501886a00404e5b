"""Apply what an algorithm does to rewards before it computes advantages, and count it."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.algorithms.base import AdvantageInputs, Algorithm
from megarl.config.schema import TrainConfig
from megarl.packing import Sample


def shaped(
    algorithm: Algorithm,
    lengths: Sequence[int],
    rewards: Sequence[float | None],
    config: TrainConfig,
) -> list[float | None]:
    """Return the rewards that advantages are computed from. None is a reward that failed.

    Args:
        lengths: response tokens of each episode.
        rewards: of the episodes, as they were given.
        config: the job's, which says how many tokens an episode may have, in all of its answers."""
    longest = config.max_sampled_length
    return [
        None if reward is None else algorithm.shaped_reward(reward, length, longest)
        for length, reward in zip(lengths, rewards, strict=True)
    ]


def excluded(
    algorithm: Algorithm,
    inputs: AdvantageInputs,
    samples: Sequence[Sample],
    rewards: Sequence[float | None],
) -> tuple[list[bool], list[bool]]:
    """Return, for each episode of the step, whether the policy's loss leaves it out because its reward failed
    or its response was cut, and whether it does for any reason.

    Args:
        samples: the first sample of each episode."""
    filtered = [
        reward is None or algorithm.is_left_out(sample.truncated)
        for sample, reward in zip(samples, rewards, strict=True)
    ]
    by_rewards = algorithm.left_out(inputs)
    are_worse = [False] * len(samples) if by_rewards is None else by_rewards.tolist()
    return filtered, [one or other for one, other in zip(filtered, are_worse, strict=True)]


def shaping_metrics(
    given: Sequence[float | None],
    rewards: Sequence[float | None],
    left_out: Sequence[bool],
    samples: Sequence[Sample],
    rows: Sequence[int],
) -> dict[str, float]:
    """Return this rank's part of reward/overlong_penalty, the mean of what shaping took off a reward, and of
    reward/overlong_filtered, the number of samples with a reward that the loss leaves out. Samples that are
    scored and not trained on do not count. Each metric is there only where it happened in the step.

    Args:
        given, rewards: before and after shaping, of all samples of the step.
        left_out: whether the loss leaves out the sample, also because its reward failed.
        samples: these samples, of which some may not be trained on.
        rows: which samples this rank counts."""
    scored = [row for row, reward in enumerate(given) if reward is not None and samples[row].trained]
    penalties = {row: (given[row] - rewards[row]) / len(scored) for row in scored}
    filtered = {row: left_out[row] for row in scored}
    metrics = {}
    if any(penalties.values()):
        metrics["reward/overlong_penalty"] = sum(penalties.get(row, 0.0) for row in rows)
    if any(filtered.values()):
        metrics["reward/overlong_filtered"] = sum(filtered.get(row, False) for row in rows)
    return metrics
