"""Find the Hugging Face folder that a path means: the folder itself, or the export or checkpoint of a run."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megarl.config.args_file import numbered
from megarl.config.errors import ConfigError, try_path
from megarl.files.checkpoints import MANIFEST, checkpoints_in, is_one_checkpoint, run_of_model
from megarl.inspect.runs import actor_argument_of, argument_of, is_run
from megarl.role_names import kind_and_suffix, number_of

_MAX_SHARD_BYTES = 5 * 10**9


def is_model(folder: Path) -> bool:
    """Return whether a folder is a Hugging Face model's."""
    return (folder / "config.json").is_file()


def model_folder(name: str) -> Path | None:
    """Return the Hugging Face folder of --model, or None if the path is a run or checkpoint without export.

    Raises: ConfigError if the path is no model, run or checkpoint."""
    folder = Path(name)
    for candidate in (folder, folder / "hf"):
        if is_model(candidate):
            return candidate
    if checkpoint_of(folder) is not None:
        return None
    if is_run(folder):
        reason, advice = "this run has no export and no checkpoint yet", " Wait for one."
    else:
        reason = (
            "is no Hugging Face folder, run or checkpoint" if folder.is_dir() else "there is no such folder"
        )
        advice = try_path(
            folder, lambda one: is_model(one) or is_run(one), "Give a folder with a config.json, or a run."
        )
    raise ConfigError([f"--model ({name}): {reason}.{advice}"])


def model_errors(name: str, flag: str = "model") -> list[str]:
    """Return the error of a --model that is no model, run or checkpoint; [] if it is one."""
    try:
        model_folder(name)
    except ConfigError as error:
        return [text.replace("--model", f"--{flag}", 1) for text in error.errors]
    return []


def checkpoint_of(folder: Path) -> Path | None:
    """Return the actor's checkpoint in a run's newest complete checkpoint, or in this checkpoint of a job."""
    if (folder / MANIFEST).is_file():
        return folder
    jobs = [folder] if is_one_checkpoint(folder) else checkpoints_in(folder)
    found = (job / "actor" for job in jobs if (job / "actor" / MANIFEST).is_file())
    return next(found, None)


def num_actors_of_run(run: Path | None) -> int:
    """Return the number of actors of a run; 1 without a run."""
    count = argument_of(run, "num-actors") if run is not None else None
    return int(count) if count is not None and count.isdecimal() else 1


def shares_episodes(run: Path | None) -> bool:
    """Return whether the actors of a run have played in the same episodes."""
    return run is not None and argument_of(run, "share-episodes") == "true"


def models_of_others(name: str) -> dict[int, str]:
    """Return number -> model of the second and further actors of the run that --model means: hf_2/ beside its hf/,
    or actor_2/ in the same checkpoint.

    Returns {} for the model of one actor, and for a path that is not of a run with several."""
    folder = Path(name)
    run = run_of_model(folder)
    numbers = range(2, num_actors_of_run(run) + 1)
    if run is None or not numbers:
        return {}
    if folder == run / "hf" or folder == run and is_model(run / "hf"):
        return {number: str(run / f"hf_{number}") for number in numbers}
    checkpoint = checkpoint_of(folder) if folder == run or is_one_checkpoint(folder) else None
    if checkpoint is None:
        return {}
    return {number: str(checkpoint.with_name(f"actor_{number}")) for number in numbers}


def ambiguous_model(number: int, name: str) -> list[str]:
    """Return the error of the --actor-N-model of one actor that names a run or checkpoint of several; [] if it
    names a model."""
    if not (others := models_of_others(name)) or Path(name).name == "hf":
        return []
    own = others.get(number) or others[2]
    return [
        f"--{numbered('model', number)} ({name}): has the models of {len(others) + 1} actors. Name one of them, "
        f"e.g. {own}."
    ]


def run_of(checkpoint: Path) -> Path:
    """Return the run folder that an actor's checkpoint lies in: run/checkpoints/step_000010/actor."""
    return checkpoint.resolve().parents[2]


def base_model(checkpoint: Path) -> Path:
    """Return the folder of the model that a run has trained, which has the configuration and the tokenizer.

    Raises: ConfigError if it cannot be found."""
    run = run_of(checkpoint)
    base = actor_argument_of(run, "model", number_of(kind_and_suffix(checkpoint.name)[1]))
    if base is None or not is_model(Path(base)):
        raise ConfigError(
            [
                f"--model ({checkpoint}): a checkpoint has no config.json, and {run / 'resolved.args'} names "
                f"no --model that is here ({base}). Export it: megarl convert --model M --load "
                f"{checkpoint} --save OUT, and give OUT."
            ]
        )
    return Path(base)


def tokenizer_of_run(checkpoint: Path) -> Path | None:
    """Return the tokenizer that the run of a checkpoint has trained with, if it is not that of its model."""
    number = number_of(kind_and_suffix(checkpoint.name)[1])
    path = actor_argument_of(run_of(checkpoint), "tokenizer-model", number)
    return Path(path) if path and path != "none" else None


@contextlib.contextmanager
def exported(name: str, within: str | None = None) -> Iterator[Path]:
    """Yield the Hugging Face folder of --model. A checkpoint is exported into a temporary folder first.

    Args:
        within: folder in which the temporary folder is made. None: the default one.
    Raises: ConfigError if there is no model, or its checkpoint cannot be read."""
    folder = model_folder(name)
    if folder is not None:
        yield folder
        return
    from megarl.checkpoint.sources import open_weights
    from megarl.checkpoint.stream import write_hf
    from megarl.config.hf_config import ModelShape

    checkpoint = checkpoint_of(Path(name))
    base = base_model(checkpoint)
    with tempfile.TemporaryDirectory(prefix="megarl-export-", dir=within) as temporary:
        sys.stderr.write(f"exporting {checkpoint}, as there is no hf/ beside it\n")
        shape = ModelShape.load(str(base))
        try:
            source = open_weights(checkpoint, shape)
            source.check()
            out = Path(temporary, "hf")
            write_hf(out, source, shape, base, source.dtype, _MAX_SHARD_BYTES, tokenizer_of_run(checkpoint))
        except (ValueError, OSError) as error:
            raise ConfigError([f"--model ({name}): {error}"]) from error
        yield Path(temporary, "hf")
