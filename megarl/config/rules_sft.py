"""Check the flags of fine-tuning that is mixed into RL."""

from __future__ import annotations

from megarl.config.errors import Errors
from megarl.config.flags import refuse_set
from megarl.config.rules_layout import Job


def sft_stream(job: Job) -> Errors:
    """Yield an error per flag of the stream that has no effect, or that the job cannot combine with it."""
    config, given = job.config, job.config.sft
    if not given.sft_data:
        yield from refuse_set(given, "has no effect without --sft-data. Leave it out, or name --sft-data.")
        return
    shown = f"--sft-data ({' '.join(given.sft_data)})"
    if not config.algorithm.needs_rollout:
        yield f"{shown}: is mixed into training on samples, and this job samples nothing. Try --train-data."
    replay = config.experts.moe_routing_replay
    if replay != "none":
        yield (
            f"--moe-routing-replay ({replay}): replays the experts of sampled tokens, which the rows of --sft-data "
            "do not have. Try --moe-routing-replay none, or leave --sft-data out."
        )
