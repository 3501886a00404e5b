"""Metrics of episodes: a failure is no wrong answer, and each environment has its own.

pytest tests/trainer/test_episode_metrics.py"""

from __future__ import annotations

import dataclasses

import pytest

from megarl.packing import Sample
from megarl.trainer.episode_metrics import metrics_of_episodes
from megarl.trainer.rollout_batch import RolloutBatch


def batch_of(groups: list[tuple[str | None, list[float | None]]]) -> RolloutBatch:
    """One group per environment's name and rewards; sample i has i + 1 turns."""
    batch = RolloutBatch(1, {number: number for number in range(len(groups))})
    records = {}
    for group, (name, rewards) in enumerate(groups):
        for reward in rewards:
            number = len(batch.samples)
            batch.samples.append(Sample(number, 10, 5, group=group))
            batch.rewards[number] = reward
            failed = {} if reward is not None else {"cause": "timeout"}
            named = {} if name is None else {"env": name}
            ended = "stop" if reward is not None else "env"
            records[number] = {"sample_id": number, "num_turns": number + 1, "finish_reason": ended}
            records[number] |= failed | named
    batch.records = {"reward": records}
    return batch


def test_environments_and_groups_have_metrics_of_their_own():
    metrics = metrics_of_episodes(
        batch_of([("a", [1.0, 0.0]), ("b/c", [0.0, None, 0.0]), ("b/c", [None, None]), ("a", [0.0, 0.0])])
    )
    assert metrics == pytest.approx(
        {
            "turns/mean": 5.0,
            "turns/max": 9,
            "finish/stop": 6 / 9,
            "finish/turns": 0.0,
            "finish/context": 0.0,
            "finish/env": 3 / 9,
            "reward/failed_timeout": 3.0,
            "groups/same_reward": 2 / 4,
            "groups/failed": 1 / 4,
            "groups/partly_failed": 1 / 4,
            "reward/a/mean": 1 / 4,
            "reward/a/failed": 0.0,
            "turns/a/mean": (1 + 2 + 8 + 9) / 4,
            "batch/a/episodes": 4.0,
            "groups/a/same_reward": 1 / 2,
            "groups/a/failed": 0.0,
            "groups/a/partly_failed": 0.0,
            "reward/b/c/mean": 0.0,
            "reward/b/c/failed": 3.0,
            "turns/b/c/mean": (3 + 4 + 5 + 6 + 7) / 5,
            "batch/b/c/episodes": 5.0,
            "groups/b/c/same_reward": 1 / 2,
            "groups/b/c/failed": 1 / 2,
            "groups/b/c/partly_failed": 1 / 2,
        }
    )


def test_without_names_there_are_none_of_single_environments():
    metrics = metrics_of_episodes(batch_of([(None, [1.0, 1.0])]))
    assert metrics["groups/same_reward"] == 1.0 and not [key for key in metrics if key.count("/") > 1]
    assert metrics_of_episodes(RolloutBatch(1, {})) == {}


def test_what_is_only_scored_is_in_no_metric():
    """The greedy answers of remax, which nothing trains on."""
    batch = batch_of([("a", [1.0, 1.0, 0.0]), ("a", [0.0, 1.0, None])])
    for greedy in (2, 5):
        batch.samples[greedy] = dataclasses.replace(batch.samples[greedy], trained=False)
    metrics = metrics_of_episodes(batch)
    assert metrics["reward/a/mean"] == 3 / 4 and metrics["batch/a/episodes"] == 4.0
    assert metrics["turns/mean"] == (1 + 2 + 4 + 5) / 4 and metrics["groups/same_reward"] == 1 / 2
    assert not any(name.startswith("reward/failed") for name in metrics) and metrics["reward/a/failed"] == 0.0
