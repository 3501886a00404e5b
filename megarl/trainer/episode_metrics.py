"""Compute the metrics of multi-turn episodes: turns, ends, failures and groups, of all and of each
environment.

An episode that has failed has no reward. It counts as a failure, never as a wrong answer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from megarl.episodes.episode import FINISH_REASONS
from megarl.flow.job_roles import Record
from megarl.trainer.rollout_batch import RolloutBatch


def metrics_of_episodes(batch: RolloutBatch) -> dict[str, float]:
    """Return the metrics of the batch's episodes that are trained on; {} if the job has none.

    The names of environments are in the keys only if --env gives names."""
    trained = {sample.sample_id for sample in batch.trained_episodes}
    records = [
        record
        for of_role in batch.records.values()
        for sample, record in of_role.items()
        if "num_turns" in record and sample in trained
    ]
    if not records:
        return {}
    turns = [record["num_turns"] for record in records]
    causes = Counter(record["cause"] for record in records if "cause" in record)
    ends = Counter(record["finish_reason"] for record in records)
    branches = [record["num_branches"] for record in records if "num_branches" in record]
    of_agents = {}
    if branches:
        of_agents = {
            "branches/mean": sum(branches) / len(branches),
            "branches/max": max(branches),
            "tool_calls/unreadable": sum(record.get("num_unreadable", 0) for record in records),
            "turns/constrained": sum(record.get("num_constrained", 0) for record in records),
        }
    return {
        "turns/mean": sum(turns) / len(turns),
        "turns/max": max(turns),
        **of_agents,
        **{f"finish/{reason}": ends[reason] / len(records) for reason in FINISH_REASONS},
        **{f"reward/failed_{cause}": float(count) for cause, count in sorted(causes.items())},
        **_of_groups(_grouped(batch, records)),
        **_of_environments(batch, records),
    }


def by_environment(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return name of the environment, fit for the key of a metric -> its records, in the order of the names;
    {} if environments have no names."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if "env" in record:
            found.setdefault(readable(record["env"]), []).append(record)
    return dict(sorted(found.items()))


def readable(name: str) -> str:
    """Return the name with characters that MLflow refuses in the key of a metric replaced."""
    return re.sub(r"[^\w./ -]", "_", name)


def _of_environments(batch: RolloutBatch, records: Sequence[Record]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, own in by_environment(records).items():
        rewards = [reward for record in own if (reward := batch.rewards[record["sample_id"]]) is not None]
        if rewards:
            metrics[f"reward/{name}/mean"] = sum(rewards) / len(rewards)
        metrics[f"reward/{name}/failed"] = float(len(own) - len(rewards))
        metrics[f"turns/{name}/mean"] = sum(record["num_turns"] for record in own) / len(own)
        metrics[f"batch/{name}/episodes"] = float(len(own))
        metrics |= {
            key.replace("/", f"/{name}/", 1): value for key, value in _of_groups(_grouped(batch, own)).items()
        }
    return metrics


def _grouped(batch: RolloutBatch, records: Sequence[Record]) -> list[list[float | None]]:
    """Return the rewards of each group of these records; None for an episode that has failed."""
    group_of = {sample.sample_id: sample.group for sample in batch.samples}
    found: dict[int, list[float | None]] = {}
    for record in records:
        sample = record["sample_id"]
        found.setdefault(group_of[sample], []).append(batch.rewards[sample])
    return list(found.values())


def _of_groups(groups: Sequence[Sequence[float | None]]) -> dict[str, float]:
    """Return how many groups teach nothing because all rewards are equal, and how many because of failures.

    A group is judged by the episodes that have a reward, as its advantages are."""
    scored = [[reward for reward in group if reward is not None] for group in groups]
    return {
        "groups/same_reward": sum(len({*rewards}) == 1 for rewards in scored) / len(groups),
        "groups/failed": sum(not rewards for rewards in scored) / len(groups),
        "groups/partly_failed": sum(
            0 < len(rewards) < len(group) for rewards, group in zip(scored, groups, strict=True)
        )
        / len(groups),
    }
