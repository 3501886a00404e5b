"""Compute the rewards of a step: the weighted sum of the scores of the rule and of the reward models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megarl.episodes.episode import SILENT
from megarl.failures import ExplainedError
from megarl.flow.job_roles import Record
from megarl.invariants import check_rewards, check_scores
from megarl.rewards.combine import combine_rewards
from megarl.trainer.rollout_batch import RolloutBatch


class RewardsFailed(ExplainedError, RuntimeError):
    """More rewards of a step failed than --reward-max-failed-share allows."""

    read_on = "docs/data_and_rewards.md, section Your own reward"


class EpisodesFailed(RewardsFailed):
    """The rewards are missing because environments or agents have failed."""

    read_on = "docs/agents.md, section When an environment fails"


def take_scores(
    batch: RolloutBatch, role: str, per_rank: Iterable[Iterable[Record]], weight_of: Mapping[str, float]
) -> None:
    """Store the scores that a role gave the batch's samples, and recompute the rewards, which are weighted
    sums of all scores so far.

    Args:
        per_rank: the role's result, one list of records per rank.
        weight_of: role -> weight of its score, for all scoring roles of this job.
    Raises: InvariantError for a score of another sample."""
    records = [record for rank in per_rank for record in rank]
    check_scores(role, records, [sample for sample in batch.samples if sample.branch == 0])
    batch.records[role] = {
        record["sample_id"]: {key: value for key, value in record.items() if key != "digest"}
        for record in records
    }
    weights = {role: weight for role, weight in weight_of.items() if role in batch.records}
    rewards = []
    if weights:
        rewards = combine_rewards([scores_of(batch, role) for role in weights], list(weights.values()))
    batch.rewards = dict(zip(batch.sample_ids, rewards))
    check_rewards(batch.rewards, [(weight, _scores_by_id(batch, role)) for role, weight in weights.items()])


def scores_of(batch: RolloutBatch, role: str) -> list[float | None]:
    """Return the scores that a role gave, in the order of the batch's samples; None for a failed score."""
    return [batch.score_of(role, sample) for sample in batch.sample_ids]


def _scores_by_id(batch: RolloutBatch, role: str) -> dict[int, float | None]:
    return {sample: batch.score_of(role, sample) for sample in batch.records[role]}


def means_of_scores(records: Iterable[Record], prefix: str) -> dict[str, float]:
    """Return prefix + name -> mean of each score that a reward function returned by name; {} if it returned single
    numbers."""
    found: dict[str, list[float]] = {}
    for record in records:
        for name, score in (record.get("scores") or {}).items():
            found.setdefault(name, []).append(score)
    return {prefix + name: sum(scores) / len(scores) for name, scores in sorted(found.items())}


def check_failed_rewards(batch: RolloutBatch, roles: Sequence[str], max_share: float) -> None:
    """Raise RewardsFailed if more than `max_share` of the rewards are missing. The error gives the first
    failure with a reason. An actor that was asked for nothing has not failed.

    Args:
        roles: the roles that score the batch.
        max_share: the share of the rewards that may be missing."""
    silent = {
        sample
        for records in batch.records.values()
        for sample, record in records.items()
        if record.get("cause") == SILENT
    }
    failed = [one for one, reward in batch.rewards.items() if reward is None and one not in silent]
    if len(failed) <= max_share * len(batch.rewards):
        return
    records = (batch.records[role][sample] for sample in failed for role in roles)
    first = next((record for record in records if record.get("failure")), {})
    unexplained = next(
        f"{role} gave none for sample {sample}"
        for sample in failed
        for role in roles
        if batch.score_of(role, sample) is None
    )
    raise (EpisodesFailed if "cause" in first else RewardsFailed)(
        f"{len(failed)} of {len(batch.rewards)} rewards have failed, and --reward-max-failed-share "
        f"({max_share:g}) allows "
        f"{int(max_share * len(batch.rewards))}. The first: {first.get('failure', unexplained)}"
    )
