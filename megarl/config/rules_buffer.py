"""Check that a job can train on the groups of samples that the checkpoint of an asynchronous run holds."""

from __future__ import annotations

import re

from megarl.config.args_file import numbered
from megarl.config.errors import Errors
from megarl.config.flags import algorithm_name
from megarl.config.hf_families import Json
from megarl.config.schema import TrainConfig


def buffer_errors(config: TrainConfig, number: int, actor: Json, saved: Json) -> Errors:
    """Yield an error per flag with which an actor cannot train on the groups of samples in a checkpoint.

    Args:
        number: number of the actor, from 1.
        actor: its part of job.json.
        saved: the content of job.json."""
    batch, groups = config.batch, actor.get("buffer", ())
    if not groups:
        return
    staleness = max(config.streaming.staleness, actor.get("staleness", 0))  # a smaller one is another error
    num_greedy = config.algorithm.greedy_samples
    saved_greedy = actor.get("greedy_samples", num_greedy)  # older checkpoints lack it
    if saved_greedy != num_greedy:
        yield (
            f"--{numbered('algorithm', number)} ({algorithm_name(type(config.algorithm))}): has {num_greedy} "
            f"greedy responses per prompt, and the groups in the checkpoint that --load names have "
            f"{saved_greedy}. {_saved_algorithm(number, saved)}, or start a new run from the exported hf/ "
            "folder."
        )
        return
    sizes = {group["num_samples"] - num_greedy for group in groups} - {batch.num_samples_per_prompt}
    if sizes:
        flag = numbered("num-samples-per-prompt", number)
        yield (
            f"--{flag} ({batch.num_samples_per_prompt}): the run that --load continues had {max(sizes)}, and "
            f"its checkpoint holds groups of that size. Try --{flag} {max(sizes)}."
        )
        return
    step = saved["step"] + 1

    def is_in_time(num_prompts: int) -> bool:
        return all(
            step + place // num_prompts <= group["version"] + staleness + 1
            for place, group in enumerate(groups)
        )

    if not is_in_time(batch.num_prompts):
        flag, n = numbered("num-prompts", number), batch.num_samples_per_prompt
        fitting = (
            more
            for more in range(batch.num_prompts + 1, len(groups) + batch.global_batch_size + 1)
            if more * n % batch.global_batch_size == 0 and is_in_time(more)
        )
        yield (
            f"--{flag} ({batch.num_prompts}): the checkpoint that --load names holds {len(groups)} prompts, "
            f"which would be older than --staleness ({staleness}) before a step trains on the last of them. "
            f"Try --{flag} {next(fitting)}."
        )


def _saved_algorithm(number: int, saved: Json) -> str:
    """Return the advice to take the algorithm that an actor had."""
    flag, arguments = numbered("algorithm", number), str(saved.get("arguments"))
    for name in (flag, "algorithm"):  # a further actor has the first one's by default
        if found := re.search(rf"^--{name} (\S+)$", arguments, re.MULTILINE):
            return f"Try --{flag} {found[1]}"
    return "Give the algorithm of that run"
