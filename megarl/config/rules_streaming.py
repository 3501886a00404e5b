"""Check the flags of asynchronous rollouts, and return the defaults that depend on --staleness.

In asynchronous training the weights that sampled a token may be older than those that are trained on it."""

from __future__ import annotations

from pathlib import Path

from megarl.config.errors import Errors, try_path
from megarl.config.flags import refuse_set
from megarl.config.rules_layout import Job
from megarl.config.schema import TrainConfig

ARGUMENTS = "resolved.args"
"""File that every run folder holds."""
TIS_CLIP = 2.0
"""Default of --tis-clip for --staleness above 0, the value that other frameworks use."""


def stale_defaults(staleness: int) -> dict[str, object]:
    """Return field -> default for the algorithm's fields that are None by default and have another default
    with this --staleness."""
    return {"tis_clip": TIS_CLIP} if staleness > 0 else {}


def staleness(job: Job) -> Errors:
    """Yield an error per flag of asynchronous rollouts that does not fit --staleness or the algorithm."""
    values = job.config.streaming
    if not values.staleness:
        yield from refuse_set(
            values,
            "has no effect in synchronous training. Leave it out, or set --staleness 1.",
            *(
                "rollout_order",
                "weight_update",
                "num_canaries",
                "replay",
                "max_tokens_per_step",
                "min_engines",
                "eval_engines",
            ),
        )
    elif not job.uses_rollout:
        yield (
            f"--staleness ({values.staleness}): supervised fine-tuning samples no responses that could be "
            "stale. Leave it out."
        )


def routing_replay(job: Job) -> Errors:
    """Yield an error for --moe-routing-replay engine if a response may be sampled by several versions of the
    weights.

    When a prefix is computed anew, the engine reports the experts of the new weights for tokens that were
    sampled with the experts of the old weights. With --weight-update keep this happens at a checkpoint and
    when the KV cache is full."""
    values = job.config.streaming
    is_replayed = job.config.experts.moe_routing_replay == "engine"
    if is_replayed and job.uses_rollout and values.staleness and values.weight_update != "wait":
        yield (
            f"--weight-update ({values.weight_update}): with --moe-routing-replay engine a response must be "
            "sampled by one version of the weights, because the engine reports other experts when it computes "
            "a prefix anew. Try --weight-update wait, or try --moe-routing-replay policy."
        )


def max_tokens_per_step(job: Job) -> Errors:
    """Yield an error for --max-tokens-per-step if no response can have that many tokens, or if a response
    cannot be continued with other weights."""
    limit, longest = job.config.streaming.max_tokens_per_step, job.config.sampling.max_response_length
    if limit is None or not job.config.streaming.staleness or not job.uses_rollout:
        return
    if job.config.streaming.weight_update == "wait":
        yield (
            f"--max-tokens-per-step ({limit}): a response goes on with the next version of the weights, but "
            "with --weight-update wait one version samples all of it. Try --weight-update recompute."
        )
    if job.config.sampling.stop:
        yield (
            f"--max-tokens-per-step ({limit}): a response goes on as a new request, which does not find a stop "
            "string that has begun before. Try --stop-token-ids in place of --stop."
        )
    if limit >= longest:
        yield (
            f"--max-tokens-per-step ({limit}): must be below --max-response-length ({longest}), or it has no "
            f"effect. Leave it out{f', or try {longest // 2}' if longest > 1 else ''}."
        )


def min_engines(job: Job) -> Errors:
    """Yield an error for --min-engines if the engines cannot end one by one, or are fewer."""
    wanted, ranks = job.config.streaming.min_engines, job.ranks.get("rollout")
    if wanted is None or not job.config.streaming.staleness or not job.uses_rollout or not ranks:
        return
    number = len(ranks) // job.config.rollout.tensor_parallel_size
    if job.engine == "in-process":
        yield (
            f"--min-engines ({wanted}): an engine in the process of its rank cannot end alone. Try "
            "--rollout-engine out-of-process, or leave --min-engines out."
        )
    elif wanted > number > 0:
        yield f"--min-engines ({wanted}): the job has {number} engines. Try {max(1, number - 1)}."


def eval_engines(job: Job) -> Errors:
    """Yield an error for --eval-engines if no engine would be left to train with, or if an engine cannot keep
    its weights while others get new ones."""
    values, ranks = job.config.streaming, job.ranks.get("rollout")
    wanted = values.eval_engines
    if not wanted or not values.staleness or not job.uses_rollout or not ranks:
        return
    number = len(ranks) // job.config.rollout.tensor_parallel_size
    if job.engine == "in-process":
        yield (
            f"--eval-engines ({wanted}): an engine in the process of its rank gets every update of the weights. "
            "Try --rollout-engine out-of-process, or leave --eval-engines out."
        )
    elif number == 1:
        yield f"--eval-engines ({wanted}): the job has 1 engine, which must train. Leave --eval-engines out."
    elif wanted >= number > 1:
        yield (
            f"--eval-engines ({wanted}): the job has {number} engines, and one at least must train. Try "
            f"{number - 1}."
        )
    if not job.config.run.eval_interval:
        yield f"--eval-engines ({wanted}): needs --eval-interval. Leave it out, or set --eval-interval 5."
    if job.config.episodes.has_turns:
        yield f"--eval-engines ({wanted}): has no effect on held-out episodes. Leave it out."
    if values.replay is not None:
        yield (
            f"--eval-engines ({wanted}): --replay ({values.replay}) cannot repeat which step an evaluation ends "
            "in. Leave one of the two out."
        )
    if values.min_engines is not None and values.min_engines <= wanted:
        yield (
            f"--min-engines ({values.min_engines}): must be above --eval-engines ({wanted}), so that an engine is "
            f"left to train with. Try --min-engines {wanted + 1}."
        )


def replay(job: Job) -> Errors:
    """Yield an error for --replay if it names no run folder."""
    run = job.config.streaming.replay
    if run is None or not job.config.streaming.staleness or not job.uses_rollout:
        return
    if Path(run).resolve() == Path(job.config.run.save).resolve():
        yield f"--replay ({run}): is --save too, and a run cannot repeat itself. Try another --save."
    elif not (Path(run) / ARGUMENTS).is_file():
        advice = try_path(
            Path(run),
            lambda folder: (folder / ARGUMENTS).is_file(),
            "Name the folder that was the run's --save, or leave it out.",
        )
        yield f"--replay ({run}): is not a run folder, because it holds no {ARGUMENTS}.{advice}"
    if job.config.streaming.max_tokens_per_step is not None and job.engine == "out-of-process":
        yield (
            f"--replay ({run}): cannot repeat --max-tokens-per-step with engines in processes of their own, "
            "where timing decides when a response continues. Leave one of the two out."
        )


def correction_warnings(config: TrainConfig) -> Errors:
    """Yield a warning if samples may be stale and nothing in the loss corrects for it."""
    algorithm, stale = config.algorithm, config.streaming.staleness
    if not stale or not algorithm.needs_rollout or algorithm.has_correction or not algorithm.needs_correction:
        return
    if not algorithm.has_ratio:  # rules_algorithm.py refuses it
        return
    head = "the loss does not correct for weights that were older when they sampled"
    reason = (
        "its ratio compares with the log-probs of the step's first weights, so it starts at exactly 1 and "
        "clipping does not see staleness"
    )
    if hasattr(algorithm, "tis_clip"):
        yield f"--tis-clip (none): with --staleness {stale} {head}: {reason}. Try --tis-clip {TIS_CLIP:g}."
    else:
        yield f"--staleness ({stale}): {head}: {reason}, and the algorithm has no --tis-clip. Try --staleness 0."
