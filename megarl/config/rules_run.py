"""Check flags of the run and of its profiles.

Each rule is a function of the job, named by its subject, and yields an error per wrong flag."""

from __future__ import annotations

from megarl.config.errors import Errors
from megarl.config.flags import algorithm_name, refuse_set
from megarl.config.rules_layout import Job


def run(job: Job) -> Errors:
    """Yield an error for --exit-loss in a job that samples, which nothing ends early."""
    config = job.config
    if job.uses_rollout:
        reason = (
            "is for training on answers in the data. The loss of a policy gradient says nothing of progress, "
            f"so --algorithm {algorithm_name(type(config.algorithm))} ends after --train-iters. Leave it out."
        )
        yield from refuse_set(config.run, reason, "exit_loss")


def profile(job: Job) -> Errors:
    """Yield an error per --profile-... flag that names steps or ranks which the job does not have."""
    options, iters = job.config.profile, job.config.batch.train_iters
    if options.profile is None:
        return
    start, end, ranks = options.profile_step_start, options.profile_step_end, options.profile_ranks
    if start >= iters:
        works = f"--profile-step-start {iters - 1} --profile-step-end {iters}"
        yield f"--profile-step-start ({start}): must be below --train-iters ({iters}). Try {works}."
    elif end <= start:
        yield (
            f"--profile-step-end ({end}): must be above --profile-step-start ({start}), because the profiled "
            f"steps are those after it. Try --profile-step-end {start + 1}."
        )
    elif end > iters:
        yield (
            f"--profile-step-end ({end}): must be at most --train-iters ({iters}), the last step. "
            f"Try --profile-step-end {iters}."
        )
    all_ranks = range(job.world_size)
    kept = sorted({rank for rank in ranks if rank in all_ranks}) or [0]
    advice = f"Try --profile-ranks {' '.join(map(str, kept))}."
    shown = f"--profile-ranks ({' '.join(map(str, ranks))})"
    if not ranks:
        yield f"{shown}: must name at least one rank. {advice}"
    elif outside := [rank for rank in ranks if rank not in all_ranks]:
        yield f"{shown}: rank {outside[0]} is not among the job's ranks, 0 to {job.world_size - 1}. {advice}"
    elif len({*ranks}) < len(ranks):
        yield f"{shown}: must name each rank once. {advice}"
