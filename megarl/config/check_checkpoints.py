"""Rules about --load: is there a checkpoint, and is it one of this job. Reads job.json only; the ranks find
what is damaged in the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.config.checkpoint_folders import (
    CHECKPOINTS,
    JOB,
    MANIFEST,
    JobFileError,
    checkpoints_in,
    found_by,
    goes_on,
    is_one_checkpoint,
    read_job,
    step_of,
)
from megarl.config.flags import numbered
from megarl.config.hf_config import ModelShape
from megarl.config.model_function import differences, function_fields, not_compared
from megarl.config.roles import configs_of_actors
from megarl.config.schema import TrainConfig
from megarl.role_names import suffix_of


def described_models(config: TrainConfig) -> dict[str, dict[str, object]]:
    """Trained role -> what of its model decides which function the tensors of a checkpoint compute. Raises:
    ConfigError for a config.json that is wrong."""
    models = {}
    for suffix, of_actor in configs_of_actors(config).items():
        models[f"actor{suffix}"] = function_fields(ModelShape.load(of_actor.model.model), of_actor.lora)
        if of_actor.critic is not None:
            folder = of_actor.model.critic_model or of_actor.model.model
            models[f"critic{suffix}"] = function_fields(
                ModelShape.load(folder, value_head=True), of_actor.critic_lora
            )
    return models


def uncompared_models(config: TrainConfig, saved: Mapping[str, object]) -> list[str]:
    """What of the models an older checkpoint does not say, one line per role; `saved`: job.json."""
    missing = {
        role: not_compared(saved["models"][role], model)
        for role, model in described_models(config).items()
        if role in saved["models"]
    }
    return [
        f"--load ({config.checkpoint.load}): an earlier version saved it and did not store "
        f"{', '.join(names)} of its {role}, so they could not be "
        "compared with --model"
        for role, names in missing.items()
        if names
    ]


def checkpoint_notes(config: TrainConfig) -> list[str]:
    """What to tell of --load that is no error."""
    try:
        found = newest_job(config) if config.checkpoint.load is not None else None
    except JobFileError:
        return []
    return uncompared_models(config, found[1]) if found is not None else []


def checkpoint_findings(config: TrainConfig) -> list[str]:
    """Of a job whose models can be read."""
    findings = [*_unsavable(config), *_unclear_restart(config)]
    if config.checkpoint.load is None or findings:
        return findings
    try:
        found = newest_job(config)
    except JobFileError as error:
        return [str(error)]
    return list(_disagreements(config, *found)) if found is not None else []


def is_savable(config: TrainConfig) -> bool:
    """Whether there can be checkpoints of the job: not with --optimizer-cpu-offload."""
    return not any(
        of_role is not None and of_role.optimizer_cpu_offload
        for of_actor in configs_of_actors(config).values()
        for of_role in (of_actor.optimizer, of_actor.critic_optimizer)
    )


def _unsavable(config: TrainConfig) -> Iterator[str]:
    load, interval, restarts = (
        config.checkpoint.load,
        config.checkpoint.save_interval,
        config.checkpoint.max_restarts,
    )
    if (interval or load is not None or restarts) and not is_savable(config):
        flag = (
            f"--save-interval ({interval})"
            if interval
            else f"--load ({load})"
            if load is not None
            else f"--max-restarts ({restarts})"
        )
        yield (
            f"{flag}: the state of --optimizer-cpu-offload cannot be saved or loaded yet. Leave "
            "one out; --offload optimizer can be saved."
        )


def _unclear_restart(config: TrainConfig) -> Iterator[str]:
    """A restart takes the newest checkpoint of --save: if the first attempt fails before it has removed those
    that it is to do without, that would be one of them."""
    restarts, load = config.checkpoint.max_restarts, config.checkpoint.load
    if not restarts or load is None or not goes_on(config) or not is_one_checkpoint(Path(load)):
        return
    newest = checkpoints_in(Path(config.run.save))[:1]
    if newest and step_of(newest[0]) > step_of(Path(load)):
        yield (
            f"--max-restarts ({restarts}): a restart goes on from the newest checkpoint of --save, "
            f"and --load ({load}) is an older one of the "
            f"same run, whose newest is {newest[0]}. Remove the newer ones, or try --max-restarts 0."
        )


def newest_job(config: TrainConfig) -> tuple[Path, dict[str, object]] | None:
    """The checkpoint that is tried first, and its job.json; None: the run begins in an empty folder.

    Raises: JobFileError if --load names none."""
    problems = []
    for folder in found_by(config.checkpoint.load):
        try:
            return folder, read_job(folder)
        except JobFileError as error:
            problems.append(str(error))
    if problems:
        raise JobFileError(
            f"--load ({config.checkpoint.load}): holds no whole checkpoint. {' '.join(problems)} "
            "Name another run, or leave it out."
        )
    if goes_on(config) and Path(config.checkpoint.load).resolve() == Path(config.run.save).resolve():
        return None
    raise JobFileError(f"--load ({config.checkpoint.load}): {_why_none(Path(config.checkpoint.load))}")


def _why_none(load: Path) -> str:
    if not load.is_dir():
        return "there is no such folder. Name a run folder, or leave it out for a new run."
    if (load.parent / JOB).is_file():
        return f"is the part of one role. Try --load {load.parent}."
    if load.name == CHECKPOINTS and checkpoints_in(load.parent):
        return f"is the folder of a run's checkpoints. Try --load {load.parent}."
    if (load / MANIFEST).is_file():
        return (
            "is a checkpoint of one model, not of a job. Make a Hugging Face folder of it by "
            "`megarl convert` and give that as --model."
        )
    return "holds no checkpoints/step_*. Name a run folder, or leave it out for a new run."


def _disagreements(config: TrainConfig, folder: Path, saved: Mapping[str, object]) -> Iterator[str]:
    head, step = f"--load ({config.checkpoint.load}): {folder.name}", saved["step"]
    if config.batch.train_iters < step:
        yield (
            f"--train-iters ({config.batch.train_iters}): {folder} is of step {step} already. Try "
            f"--train-iters {2 * step}."
        )
    for role, model in described_models(config).items():
        if role not in saved["models"]:
            yield (
                f"{head} has no {role}, but {', '.join(saved['models'])}. Leave --load out, or "
                "name a run that has one."
            )
            continue
        if different := differences(saved["models"][role], model):
            yield (
                f"{head} is of another model: its {role} has {', '.join(different)}. Give the "
                "model that the run had, or leave --load out."
            )
    for number, (suffix, of_actor) in enumerate(configs_of_actors(config).items(), 1):
        if suffix in saved["actors"]:
            yield from _order_findings(of_actor, number, saved["actors"][suffix]["cursor"])


def _order_findings(config: TrainConfig, number: int, cursor: Mapping[str, object]) -> Iterator[str]:
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


def rows_finding(config: TrainConfig, number: int, num_rows: int, saved: Mapping[str, object]) -> str | None:
    """What is wrong with the number of training rows of an actor; `saved`: job.json."""
    cursor = saved["actors"].get(suffix_of(number - 1), {}).get("cursor", {"num_rows": num_rows})
    if cursor["num_rows"] == num_rows:
        return None
    return (
        f"--{numbered('train-data', number)} ({' '.join(config.data.train_data)}): has {num_rows} "
        "rows, and the run that --load continues has "
        f"{cursor['num_rows']}. Give the same files, or start a new run from the exported hf/ folder."
    )
