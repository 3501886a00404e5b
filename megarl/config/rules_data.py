"""Check the flags that decide which rows come next, also against the run that --load continues."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megarl.config.args_file import numbered
from megarl.config.errors import Errors
from megarl.config.flags import refuse_set
from megarl.config.hf_families import Json
from megarl.config.rules_layout import Job
from megarl.config.schema import TrainConfig
from megarl.role_names import suffix_of


def weights_errors(weights: tuple[float, ...] | None, files: tuple[str, ...]) -> Errors:
    """Yield an error for weights of the training files that are not one positive number for each."""
    if weights is None or not files:
        return
    head = f"--train-data-weights ({' '.join(f'{weight:g}' for weight in weights)})"
    if len(weights) != len(files):
        yield (
            f"{head}: must be one number per --train-data file ({len(files)}). Try "
            f"{' '.join('1' for _ in files)}, or leave it out."
        )
    elif not all(0 < weight < math.inf for weight in weights):
        yield f"{head}: must be above 0 and finite. Leave out a file that is not wanted."


def curriculum(job: Job) -> Errors:
    """Yield an error per flag of the curriculum that has no effect, or that the job cannot follow."""
    config, given = job.config, job.config.curriculum
    low, high = given.difficulty_min, given.difficulty_max
    if low is None and high is None:
        yield from refuse_set(
            given,
            "has no effect without a limit. Leave it out, or try --difficulty-max 1.",
            "difficulty_rest",
        )
    if low is not None and high is not None and low >= high:
        yield f"--difficulty-max ({high:g}): must be above --difficulty-min ({low:g}). Try --difficulty-max none."
    if not given.is_measured:
        return
    flag = next(
        name
        for name, is_given in (
            ("--curriculum", given.curriculum != "shuffled"),
            ("--difficulty-min", low is not None),
            ("--difficulty-max", high is not None),
        )
        if is_given
    )
    if not config.algorithm.needs_rollout:
        yield f"{flag}: is by the rewards of sampled responses, and this job samples nothing. Leave it out."
    if config.data.train_data_weights is not None:
        yield f"{flag}: is not built for --train-data-weights. Leave one of them out."


def order_errors(config: TrainConfig, number: int, cursor: Json) -> Errors:
    """Yield an error per flag by which an actor would get other rows than the run that --load continues.

    Args:
        number: number of the actor, from 1.
        cursor: its position in the data, of job.json."""
    if _has_other_weights(config, cursor):
        flag, weights = numbered("train-data-weights", number), cursor.get("mixture", {}).get("weights")
        given = config.data.train_data_weights
        yield (
            f"--{flag} ({' '.join(f'{weight:g}' for weight in given) if given else 'none'}): the run that --load "
            f"continues walks over its files {'by weights' if weights else 'as one data set'}. "
            + (
                f"Try --{flag} {' '.join(f'{weight:g}' for weight in weights)}."
                if weights
                else "Leave it out."
            )
        )
    if "measured" in cursor and not config.curriculum.is_measured:
        yield (
            f"--{numbered('curriculum', number)} (shuffled): the run that --load continues had a curriculum or limits "
            "of difficulty, and is within a pass that leaves rows out. Try --difficulty-max 1, or "
            "--curriculum easy-first."
        )
    seed, shuffle = numbered("seed", number), numbered("shuffle", number)
    if config.batch.seed != cursor["seed"]:
        yield (
            f"--{seed} ({config.batch.seed}): the run that --load continues has another. Try "
            f"--{seed} {cursor['seed']}."
        )
    if config.data.shuffle != cursor["shuffle"]:
        given, wanted = (
            f"--{'' if value else 'no-'}{shuffle}" for value in (config.data.shuffle, cursor["shuffle"])
        )
        yield f"{given}: the run that --load continues had {wanted}. Try {wanted}."


def _has_other_weights(config: TrainConfig, cursor: Json) -> bool:
    """Return whether only one of this run and the run that --load continues draws rows from its files by
    weights."""
    return (config.data.train_data_weights is not None) != ("mixture" in cursor)


def rows_errors(
    config: TrainConfig, number: int, file_sizes: Sequence[int], num_sft_rows: int, saved: Json
) -> Errors:
    """Yield an error per flag whose files have other numbers of rows than in the run that --load continues.

    Args:
        number: number of the actor, from 1.
        file_sizes: rows of each file of --train-data.
        num_sft_rows: rows of --sft-data, 0 without.
        saved: the content of job.json."""
    actor, walks = saved["actors"].get(suffix_of(number - 1), {}), []
    if "mixture" in actor.get("cursor", {}):  # a walk over each file
        walks.append(
            ("train-data", config.data.train_data, [*file_sizes], actor["cursor"]["mixture"]["sizes"])
        )
    elif "cursor" in actor:
        walks.append(("train-data", config.data.train_data, [sum(file_sizes)], [actor["cursor"]["num_rows"]]))
    if num_sft_rows and "sft" in actor:
        walks.append(("sft-data", config.sft.sft_data, [num_sft_rows], [actor["sft"]["num_rows"]]))
    for flag, files, now, then in walks:
        if now != then:
            given, had = (" and ".join(map(str, sizes)) for sizes in (now, then))
            yield (
                f"--{numbered(flag, number)} ({' '.join(files)}): has {given} rows, and the run that --load "
                f"continues has {had}. Give the same files, or start a new run from the exported hf/ folder."
            )
