"""Restart a failed job from the newest checkpoint of its own run folder.

`megarl train --max-restarts N` restarts the job itself. Under torchrun --max-restarts N each attempt reads
its number from the environment. An attempt that was refused has begun nothing, and what lies in --save may be another
job's run: so a later attempt continues it only if it was begun under the same torchrun."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path

from megarl.runtime.process import attempt_number
from megarl.runtime.signing import JOB_SECRET
from megarl.files.checkpoints import checkpoints_in, step_of
from megarl.config.rules_files import goes_on
from megarl.config.schema import TrainConfig
from megarl.trainer.attempt import LAUNCHER, launcher_of_last_attempt
from megarl.trainer.run_folder import MARKS
from megarl.loggers.json_lines import cut_after


def continued(config: TrainConfig) -> TrainConfig:
    """Return the configuration of the next attempt: --load is --save, or unchanged if --load named another
    run and --save has no checkpoint yet.

    Before the first checkpoint the next attempt begins where the first one began. If that was a checkpoint of
    another run, the records in --save are removed."""
    run = Path(config.run.save)
    begins_elsewhere = config.checkpoint.load is not None and not goes_on(config)
    if begins_elsewhere and not checkpoints_in(run):
        if run.is_dir():
            cut_after(run, 0)
            shutil.rmtree(run / "tensorboard", ignore_errors=True)
        for mark in MARKS:
            with contextlib.suppress(FileNotFoundError):
                (run / mark).unlink()
        return config
    return replace(config, checkpoint=replace(config.checkpoint, load=config.run.save))


def note_launcher(env: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment variable LAUNCHER, by which the attempts that one torchrun makes at a job are told from others.

    Called on rank 0, whose driver inherits it, before the job's secret is removed from the environment. On several
    nodes it is a digest of the secret, as any node may be replaced; on one node of torchrun's process."""
    secret = env.get(JOB_SECRET)
    if secret is None:
        agent = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        secret = f"{socket.gethostname()} {os.getppid()} {agent[19]}"  # and the time at which it started
    words = f"{secret} {env.get('TORCHELASTIC_RUN_ID', '')}"
    env[LAUNCHER] = hashlib.sha256(words.encode()).hexdigest()[:16]


def of_this_attempt(config: TrainConfig, env: Mapping[str, str] = os.environ) -> TrainConfig:
    """Return the configuration of this attempt under torchrun: continued if an earlier one has begun the run."""
    has_begun = launcher_of_last_attempt(Path(config.run.save)) == env.get(LAUNCHER)
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
