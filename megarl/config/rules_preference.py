"""Check what algorithms that learn from pairs in the data require of a job."""

from __future__ import annotations

from megarl.config.errors import Errors
from megarl.config.flags import algorithm_name
from megarl.config.rules_layout import Job

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def preference(job: Job) -> Errors:
    """Yield an error for several epochs per step, and for a reference that is split otherwise than the actor."""
    config = job.config
    algorithm = config.algorithm
    if algorithm.needs_rollout or algorithm.row_needs == "response":
        return
    name = algorithm_name(type(algorithm))
    if config.batch.num_epochs > 1:
        yield (
            f"--num-epochs ({config.batch.num_epochs}): a pair's loss is derived from the model's output before the "
            f"step, so --algorithm {name} makes one update per step. Try --num-epochs 1, and more --train-iters "
            "to see rows again."
        )
    if not algorithm.needs_reference:
        return
    actor, reference = job.ranks.get("actor"), job.ranks.get("reference")
    if actor and reference and actor != reference:
        yield (
            f"--reference-ranks ({config.placement.reference_ranks}): with --algorithm {name} the reference "
            "must be on the actor's ranks, where the rows of the data are. Leave it out."
        )
    for size in _SIZES:
        ours, theirs = getattr(config.actor, size), getattr(config.reference, size)
        if ours != theirs:
            yield (
                f"--reference-{size.replace('_', '-')} ({theirs}): with --algorithm {name} it must be the "
                f"actor's ({ours}). Leave it out."
            )
