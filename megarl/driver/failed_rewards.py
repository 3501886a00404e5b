"""How many rewards of a step may fail."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.driver.rollout_batch import RolloutBatch


class RewardsFailed(RuntimeError):
    """More rewards of a step failed than may."""


def check_failed_rewards(batch: RolloutBatch, roles: Sequence[str], max_share: float) -> None:
    """roles: that score the batch. Raises: RewardsFailed with the first failure that says why."""
    failed = [sample for sample, reward in batch.rewards.items() if reward is None]
    if len(failed) <= max_share * len(batch.rewards):
        return
    reasons = (batch.records[role][sample].get("failure") for sample in failed for role in roles)
    silent = next(
        f"{role} gave none for sample {sample}"
        for sample in failed
        for role in roles
        if batch.score_of(role, sample) is None
    )
    raise RewardsFailed(
        f"{len(failed)} of {len(batch.rewards)} rewards have failed, and --reward-max-failed-share "
        f"({max_share:g}) allows "
        f"{int(max_share * len(batch.rewards))}. The first: {next(filter(None, reasons), silent)}"
    )
