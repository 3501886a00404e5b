"""Check what algorithms that learn from answers in the data, alone or in pairs, require of a job."""

from __future__ import annotations

from megarl.config.errors import Errors
from megarl.config.flags import algorithm_name
from megarl.config.rules_layout import Job

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def answers_of_data(job: Job) -> Errors:
    """Yield an error for several epochs per step, and for a temperature that would change the loss."""
    config, algorithm = job.config, job.config.algorithm
    if algorithm.needs_rollout:
        return
    name = algorithm_name(type(algorithm))
    epochs, temperature = config.batch.num_epochs, config.sampling.temperature
    if epochs > 1:
        yield (
            f"--num-epochs ({epochs}): counts passes over the rows of one step, and with --algorithm {name} "
            f"a step makes one update, on --global-batch-size rows. Try --num-epochs 1; {epochs} passes over "
            f"the data are --train-iters of {epochs} x rows / {config.batch.global_batch_size}."
        )
    if temperature != 1 and not algorithm.trains_scores:
        yield (
            f"--temperature ({temperature:g}): is for sampling, and --algorithm {name} samples nothing. Its "
            "loss is made of the log-probs of the model as it is, those at temperature 1. Try "
            "--temperature 1."
        )


def preference(job: Job) -> Errors:
    """Yield an error for a reference that is placed or split otherwise than the actor."""
    config = job.config
    algorithm = config.algorithm
    if algorithm.needs_rollout or algorithm.row_needs == "response" or not algorithm.needs_reference:
        return
    name = algorithm_name(type(algorithm))
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
