"""Restart a failed job from the newest checkpoint of its own run folder.

`megarl train --max-restarts N` restarts the job itself. Under torchrun --max-restarts N each attempt reads
its number from the environment. An attempt that was refused has begun nothing, and what lies in --save may be another
job's run: so a later attempt continues it only if it was begun under the same start of torchrun."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.config.rules_files import RUN_FILES, goes_on
from megarl.config.schema import TrainConfig
from megarl.files.checkpoints import checkpoints_in, step_of
from megarl.loggers.json_lines import cut_after
from megarl.runtime.process_tree import agent_of
from megarl.runtime.process import LAUNCHER, attempt_number, process_name
from megarl.trainer.attempt import launcher_of_last_attempt
from megarl.trainer.run_folder import lock_folder

_DRIVER_ENDS_S = 10.0
"""Seconds within which the driver of the attempt before, whose rank 0 has ended, ends too."""


def continued(config: TrainConfig) -> TrainConfig:
    """Return the configuration of the next attempt: --load is --save, or unchanged if --load named another
    run and --save has no checkpoint yet.

    Before the first checkpoint the next attempt begins where the first one began. If that was a checkpoint of
    another run, the records in --save are removed.

    Raises: ConfigError if records are to be removed while another job writes there."""
    run = Path(config.run.save)
    begins_elsewhere = config.checkpoint.load is not None and not goes_on(config)
    if not begins_elsewhere or checkpoints_in(run):
        return replace(config, checkpoint=replace(config.checkpoint, load=config.run.save))
    if run.is_dir():
        with _locked(run):
            cut_after(run, -1)
            shutil.rmtree(run / "tensorboard", ignore_errors=True)
            for mark in RUN_FILES:
                with contextlib.suppress(FileNotFoundError):
                    (run / mark).unlink()
    return config


@contextlib.contextmanager
def _locked(run: Path) -> Iterator[None]:
    """Hold the lock of a run folder, after waiting for the driver of the attempt before."""
    deadline = time.monotonic() + _DRIVER_ENDS_S
    while True:
        try:
            lock = lock_folder(run)
            break
        except ValueError as error:
            if time.monotonic() > deadline:
                raise ConfigError([str(error)]) from None
        time.sleep(0.1)
    try:
        yield
    finally:
        os.close(lock)


def note_launcher(env: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment variable LAUNCHER, which names the start of torchrun that this attempt belongs to.

    Called on rank 0, whose driver inherits it. torchrun_agent.py sets it on all nodes. Otherwise it names the
    process of torchrun on this node: where another node gets rank 0, the run is not continued."""
    env.setdefault(LAUNCHER, process_name(agent_of(os.getpid())))


def of_this_attempt(config: TrainConfig, env: Mapping[str, str] = os.environ) -> TrainConfig:
    """Return the configuration of this attempt under torchrun: continued if an earlier one has begun the run."""
    launcher = env.get(LAUNCHER)
    has_begun = launcher is not None and launcher == launcher_of_last_attempt(Path(config.run.save))
    return continued(config) if attempt_under_torchrun(env) and has_begun else config


def attempt_under_torchrun(env: Mapping[str, str] = os.environ) -> int:
    """Return how often torchrun has restarted the job, on a rank or in the driver beside it."""
    prefix = re.search(r"/attempt_(\d+)$", env.get("MEGARL_STORE_PREFIX", ""))
    return int(prefix[1]) if prefix else attempt_number(env)


def where_it_goes_on(config: TrainConfig) -> str:
    """Return a phrase that says from which checkpoint, or from where else, the next attempt continues.

    Args:
        config: the configuration that `continued` returned."""
    found = checkpoints_in(Path(config.run.save))
    if found:
        return f"from the checkpoint of step {step_of(found[0])} ({found[0]})"
    return (
        f"from the beginning{'' if goes_on(config) else f' ({config.checkpoint.load})'}: there "
        "is no checkpoint yet"
    )
