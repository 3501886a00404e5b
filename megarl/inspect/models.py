"""Find the Hugging Face folder that a path means: the folder itself, or the export or checkpoint of a run."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megarl.config.errors import ConfigError, try_path
from megarl.files.checkpoints import MANIFEST, checkpoints_in, is_one_checkpoint
from megarl.inspect.runs import argument_of, is_run

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


def checkpoint_of(folder: Path | str) -> Path | None:
    """Return the actor's checkpoint in a run's newest complete checkpoint, or in this checkpoint of a job."""
    if (folder / MANIFEST).is_file():
        return folder
    jobs = [folder] if is_one_checkpoint(folder) else checkpoints_in(folder)
    found = (job / "actor" for job in jobs if (job / "actor" / MANIFEST).is_file())
    return next(found, None)


def run_of(checkpoint: Path) -> Path:
    """Return the run folder that an actor's checkpoint lies in: run/checkpoints/step_000010/actor."""
    return checkpoint.resolve().parents[2]


def base_model(checkpoint: Path) -> Path:
    """Return the folder of the model that a run has trained, which has the configuration and the tokenizer.

    Raises: ConfigError if it cannot be found."""
    run = run_of(checkpoint)
    base = argument_of(run, "model")
    if base is None or not is_model(Path(base)):
        raise ConfigError(
            [
                f"--model ({checkpoint}): a checkpoint has no config.json, and {run / 'resolved.args'} names "
                f"no --model that is here ({base}). Export it: megarl convert --model M --load "
                f"{checkpoint} --save OUT, and give OUT."
            ]
        )
    return Path(base)


@contextlib.contextmanager
def exported(name: str) -> Iterator[Path]:
    """Yield the Hugging Face folder of --model. A checkpoint is exported into a temporary folder first.

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
    with tempfile.TemporaryDirectory(prefix="megarl-export-") as temporary:
        sys.stderr.write(f"exporting {checkpoint}, as there is no hf/ beside it\n")
        shape = ModelShape.load(str(base))
        try:
            source = open_weights(checkpoint, shape)
            source.check()
            write_hf(Path(temporary, "hf"), source, shape, base, source.dtype, _MAX_SHARD_BYTES)
        except (ValueError, OSError) as error:
            raise ConfigError([f"--model ({name}): {error}"]) from error
        yield Path(temporary, "hf")
