"""Check the files and folders that flags name: models, data, rewards, --save and --load.

Of the files, only the reward's Python file and a checkpoint's job.json are opened; the ranks find damage in
the others. Nothing is run or created."""

from __future__ import annotations

import ast
import difflib
import itertools
import os
import re
from pathlib import Path

from megarl.config.args_file import numbered
from megarl.config.errors import Errors, nearest_path
from megarl.config.hf_config import differences, function_fields, not_compared
from megarl.config.hf_families import Json
from megarl.config.roles import absent_roles, configs_of_actors, trained_models
from megarl.config.environments import environments
from megarl.config.hub import has_weights
from megarl.config.rules_buffer import buffer_errors
from megarl.config.rules_data import order_errors, weights_errors
from megarl.config.schema import TrainConfig
from megarl.config.teachers import teacher_folders
from megarl.config.user_files import changed_files
from megarl.files.checkpoints import (
    CHECKPOINTS,
    JOB,
    MANIFEST,
    JobFileError,
    checkpoints_in,
    found_by,
    is_one_checkpoint,
    read_job,
    step_of,
)
from megarl.files.writing import ReadError

DATA_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", ".parquet")
RUN_FILES = ("resolved.args", "metrics.jsonl")
"""Files whose presence marks a folder as a run. So does a checkpoint, see `mark_of_run`."""
_SIMILAR = 0.6
"""Smallest ratio of difflib at which a file is proposed in place of one that does not exist."""


def unreachable_paths(config: TrainConfig) -> Errors:
    """Yield an error per path that the system refuses to look up, e.g. because its name is too long."""
    seen = set()
    for number, of_actor in enumerate((config, *config.others), 1):
        model, data, rewards = of_actor.model, of_actor.data, of_actor.reward_models
        of_flag = {
            "model": [model.model],
            "tokenizer-model": [model.tokenizer_model],
            "critic-model": [model.critic_model],
            "reference-model": [model.reference_model],
            "teachers": teacher_folders(of_actor.algorithm),
            "train-data": data.train_data,
            "eval-data": data.eval_data,
            "sft-data": of_actor.sft.sft_data,
            "reward-function": [(data.reward_function or "").rpartition(":")[0]],
            "env": [spec.target.rpartition(":")[0] for spec in environments(of_actor.episodes)],
            "reward-model": rewards.reward_model,
            "judge-template": [rewards.judge_template],
            "save": [of_actor.run.save],
            "load": [of_actor.checkpoint.load],
        }
        for flag, path in ((flag, path) for flag, paths in of_flag.items() for path in paths):
            if not path or path in seen:
                continue
            seen.add(path)
            try:
                os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                continue  # other rules decide whether the path must exist
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", error)
                yield f"--{numbered(flag, number)} ({path}): {reason}. Give another path."


def path_errors(config: TrainConfig, new_run: bool = True) -> Errors:
    """Yield an error per missing or unusable file, and for a new run an error if --save holds a run."""
    yield from _model(config)
    if new_run and not config.data.train_data:
        yield "--train-data (): must name at least one file. Give one or more *.jsonl or *.parquet files."
    data = config.data
    yield from _data("--train-data", data.train_data, data.eval_data)
    yield from weights_errors(data.train_data_weights, data.train_data)
    yield from _data("--eval-data", data.eval_data, data.train_data)
    yield from _data("--sft-data", config.sft.sft_data, data.train_data)
    yield from _reward_function(config.data.reward_function)
    if new_run and not goes_on(config):
        yield from _save(Path(config.run.save))


def _model(config: TrainConfig) -> Errors:
    folder, tokenizer = Path(config.model.model), config.model.tokenizer_model
    is_empty = not config.model.random_init and not has_weights(folder)
    if (folder / "config.json").is_file() and is_empty:
        yield f"--model ({folder}): holds no *.safetensors. Give a folder with weights, or --random-init."
    if tokenizer is not None and not Path(tokenizer).exists():
        names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
        advice = "Give a Hugging Face tokenizer's folder, or a SentencePiece *.model file."
        if any((folder / name).exists() for name in names):
            advice = "Leave it out: --model has one."
        yield f"--tokenizer-model ({tokenizer}): does not exist. {advice}"


def _data(flag: str, files: tuple[str, ...], of_other_flag: tuple[str, ...]) -> Errors:
    for name in files:
        advice = _other_data(Path(name), of_other_flag)
        if Path(name).is_dir():
            found = itertools.islice(Path(name).rglob("*.[jp][sa]*[lt]*"), 5)  # *.jsonl* and *.parquet
            there = (
                " ".join(sorted(map(str, found))) or "one or more *.parquet files (to_parquet of datasets)"
            )
            yield f"{flag} ({name}): is a folder. Give the files in it that you mean: {there}."
        elif not Path(name).is_file():
            yield f"{flag} ({name}): there is no such file.{advice}"
        elif not is_data_file(name):
            yield f"{flag} ({name}): must end in {', '.join(DATA_SUFFIXES)}.{advice}"


def is_data_file(path: str | os.PathLike) -> bool:
    """Return whether a path is of a file that can be read as data."""
    return str(path).lower().endswith(DATA_SUFFIXES) and os.path.isfile(path)


def _other_data(path: Path, of_other_flag: tuple[str, ...]) -> str:
    """Return a sentence that proposes a data file of a similar name in the same folder, but no file of the
    other flag: training data is no evaluation data."""
    taken = {Path(name).resolve() for name in of_other_flag}
    found = nearest_path(path, lambda one: is_data_file(one) and one.resolve() not in taken)
    stems = [one.name.partition(".")[0] for one in (found or Path(), path)]
    if difflib.SequenceMatcher(None, *stems).ratio() < _SIMILAR:
        return " Give one or more *.jsonl or *.parquet files."
    return f" Try {found}."


def _reward_function(name: str | None) -> Errors:
    if name is None:
        return
    text, _, function = name.rpartition(":")
    path = Path(text)
    if not text or not function.isidentifier():
        advice = _other_function(Path(text or name))
        yield f"--reward-function ({name}): must be path/to/file.py:function.{advice}"
    elif not path.is_file():
        yield f"--reward-function ({name}): there is no file {text}.{_other_function(path)}"
    else:
        yield from _function_in_file(name, path, function)


def _other_function(path: Path) -> str:
    """Return a sentence that proposes a function of the file, or else of a Python file in its folder with a
    similar name."""

    def functions(one: Path) -> list[str]:
        try:
            return _functions(ast.parse(one.read_bytes())) if one.suffix == ".py" else []
        except (OSError, SyntaxError, ValueError):
            return []

    found = path if functions(path) else nearest_path(path, lambda one: bool(functions(one)))
    if found is None or difflib.SequenceMatcher(None, found.name, path.name).ratio() < _SIMILAR:
        return (
            " Give a function of a file of yours, whose path is relative to the folder in which you are, or leave it "
            "out for the built-in rules."
        )
    return f" Try {found}:{functions(found)[0]}."


def _functions(tree: ast.Module) -> list[str]:
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def bound_names(tree: ast.Module) -> set[str]:
    """Return all names that a file binds, with "*" for a star import."""
    bound: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=found, ctx=ast.Store()):
                bound.add(found)
            case ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found) | ast.ClassDef(name=found):
                bound.add(found)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                bound |= {alias.asname or alias.name for alias in aliases}
    return bound


def _function_in_file(name: str, path: Path, function: str) -> Errors:
    """Yield an error if the file does not define the function. The file is read, not run.

    A file with star imports is accepted, because only running it shows its names."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        yield f"--reward-function ({name}): {path} is not Python: {error.msg}, line {error.lineno}."
        return
    bound = bound_names(tree)
    functions = _functions(tree)
    if function not in bound and "*" not in bound:
        advice = f" Try {path}:{functions[0]}." if functions else ""
        defined = ", ".join(functions) or "no function at all"
        yield f"--reward-function ({name}): {path} defines no {function}, but {defined}.{advice}"


def _save(folder: Path) -> Errors:
    taken = mark_of_run(folder)
    advice = f"Try --save {free_name(folder)}."
    if taken is not None:
        if checkpoints_in(folder):
            advice = f"Try --save {free_name(folder)}, or continue that run with --load {folder}."
        yield f"--save ({folder}): holds another run ({taken}), which would be overwritten. {advice}"
    elif folder.exists() and not folder.is_dir():
        yield f"--save ({folder}): is a file; it must be a folder, which is created. {advice}"


def mark_of_run(folder: Path) -> str | None:
    """Return the file or the newest checkpoint by which a folder holds a run; None if it holds none.

    A new run would take checkpoints of another one for its own, and remove them by --keep."""
    found = [f"{CHECKPOINTS}/{path.name}" for path in checkpoints_in(folder)]
    return next((name for name in (*RUN_FILES, *found) if (folder / name).exists()), None)


def free_name(folder: Path) -> Path:
    """Return `folder` with the lowest free number appended, e.g. run-2."""
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    names = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in names if not path.exists())


def goes_on(config: TrainConfig) -> bool:
    """Return whether the job continues the run in --save, because --load names it."""
    if config.checkpoint.load is None:
        return False
    load, save = Path(config.checkpoint.load).resolve(), Path(config.run.save).resolve()
    return save == load or load.parent.name == CHECKPOINTS and save == load.parent.parent


def described_models(config: TrainConfig) -> dict[str, Json]:
    """Return trained role -> the fields of its model that decide what its weights compute.

    Raises: ConfigError for a config.json with errors."""
    return {
        f"{role}{suffix}": function_fields(model.shape, model.lora)
        for suffix, of_actor in configs_of_actors(config).items()
        for role, model in trained_models(of_actor).items()
    }


def uncompared_models(config: TrainConfig, saved: Json) -> list[str]:
    """Return a note for each role whose model could not be fully compared with the --load checkpoint, because
    an older megarl wrote the checkpoint and recorded fewer fields.

    Args:
        saved: the content of job.json."""
    missing = {
        role: not_compared(saved["models"][role], model)
        for role, model in described_models(config).items()
        if role in saved["models"]
    }
    return [
        f"--load ({config.checkpoint.load}): an earlier version saved it and did not store "
        f"{', '.join(names)} of its {role}, so they could not be compared with --model"
        for role, names in missing.items()
        if names
    ]


def checkpoint_notes(config: TrainConfig) -> list[str]:
    """Return the notes about --load that are no errors: what an older checkpoint does not store and could not
    be compared, and files of the user's that have changed."""
    try:
        found = newest_job(config) if config.checkpoint.load is not None else None
    except (JobFileError, ReadError):
        return []  # an error of `checkpoint_errors`
    if found is None:
        return []
    saved = found[1]
    return [*uncompared_models(config, saved), *changed_files(config, saved.get("user_files", {}))]


def checkpoint_errors(config: TrainConfig) -> list[str]:
    """Return the errors of --load and of restarts, for a job whose models can be read."""
    errors = [*_unsavable(config), *_unclear_restart(config)]
    if config.checkpoint.load is None or errors:
        return errors
    try:
        found = newest_job(config)
    except JobFileError as error:
        return [str(error)]
    except ReadError as error:
        return [f"--load ({config.checkpoint.load}): {error}"]
    return list(disagreements(config, *found)) if found is not None else []


def is_savable(config: TrainConfig) -> bool:
    """Return whether checkpoints can hold the job's state. With --optimizer-cpu-offload they cannot."""
    return not any(
        model.optimizer.optimizer_cpu_offload
        for of_actor in configs_of_actors(config).values()
        for model in trained_models(of_actor).values()
    )


def _unsavable(config: TrainConfig) -> Errors:
    given = {"save-interval": 0, "load": None, "max-restarts": 0}
    values = {name: getattr(config.checkpoint, name.replace("-", "_")) for name in given}
    flags = [f"--{name} ({value})" for name, value in values.items() if value != given[name]]
    if flags and not is_savable(config):
        yield (
            f"{flags[0]}: the state of --optimizer-cpu-offload cannot be saved or loaded yet. Leave "
            "one out; --offload optimizer can be saved."
        )


def _unclear_restart(config: TrainConfig) -> Errors:
    """Yield an error if the newest checkpoint of --save, from which --max-restarts goes on, is newer than the
    one that --load names.

    A restart takes the newest checkpoint. The first attempt may fail before it has removed the checkpoints
    after --load."""
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


def newest_job(config: TrainConfig) -> tuple[Path, Json] | None:
    """Return the folder and the job.json of the newest complete checkpoint that --load names; None if --load
    is --save and that holds none yet.

    Raises: JobFileError if --load names no checkpoint; ReadError if the newest one cannot be read."""
    problems = []
    for folder in found_by(config.checkpoint.load):
        try:
            return folder, read_job(folder)
        except JobFileError as error:
            problems.append(str(error))
    if problems:
        raise JobFileError(
            f"--load ({config.checkpoint.load}): holds no complete checkpoint. {' '.join(problems)} "
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


def disagreements(config: TrainConfig, folder: Path, saved: Json) -> Errors:
    """Yield an error per flag or model by which the job cannot go on from a checkpoint.

    Args:
        saved: the content of the checkpoint's job.json."""
    head, step = f"--load ({config.checkpoint.load}): {folder.name}", saved["step"]
    if config.batch.train_iters < step:
        yield (
            f"--train-iters ({config.batch.train_iters}): {folder} is of step {step} already. Try "
            f"--train-iters {2 * step}."
        )
    for role, model in described_models(config).items():
        if not (role in saved["models"] and role in saved["roles"]):
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
        if f"reference{suffix}" in saved["roles"]:
            yield from _reference_errors(of_actor, number, folder, saved)
        if suffix in saved["actors"]:
            yield from order_errors(of_actor, number, saved["actors"][suffix]["cursor"])
            yield from buffer_errors(of_actor, number, saved["actors"][suffix], saved)
    saved_staleness = max((actor.get("staleness", 0) for actor in saved["actors"].values()), default=0)
    if config.streaming.staleness < saved_staleness:
        yield (
            f"--staleness ({config.streaming.staleness}): the run that --load continues had "
            f"{saved_staleness}, and its checkpoint holds samples that may be as old. Try --staleness "
            f"{saved_staleness}."
        )


def _reference_errors(config: TrainConfig, number: int, folder: Path, saved: Json) -> Errors:
    """Yield an error if a checkpoint holds an actor's reference, which has taken over weights, and the
    reference of this job is the model that training starts from."""
    if config.model.reference_update_interval is not None or "reference" in absent_roles(
        config.algorithm, config.reward_models.reward_model
    ):
        return
    flag = numbered("reference-update-interval", number)
    interval = re.search(rf"^--{flag} (\d+)$", str(saved.get("arguments")), re.MULTILINE)
    advice = f"Try --{flag} {interval[1]}" if interval else f"Give --{flag} the number of that run"
    yield (
        f"--{flag} (none): {folder} holds a reference that has taken over weights of the actor, and this "
        f"job's is the model that training starts from. {advice}, or start a new run from the exported hf/ "
        "folder."
    )
