"""The end of a job that was told to stop (SIGTERM): the last whole step becomes a checkpoint, within
--exit-grace-s."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.check_checkpoints import is_savable
from megarl.config.checkpoint_folders import checkpoints_in, folder_of_step
from megarl.runtime.shutdown import Stopped, graceful_shutdown
from megarl.runtime.stop_request import StopRequested

if TYPE_CHECKING:
    from megarl.driver.job import Job


@contextlib.contextmanager
def stops_in_order(job: Job) -> Iterator[None]:
    """Around the loop. Raises: Stopped with what to say, after a StopRequested."""
    with graceful_shutdown(job.config.checkpoint.exit_grace_s, lambda: newest_checkpoint(job.run.folder)):
        job.stops_in_order = True
        try:
            yield
        except StopRequested:
            with job.executor.stop.held():
                job.executor.abort_calls()
                where = _checkpoint_of_last_step(job)
            raise Stopped(signal.SIGTERM, f"[driver] stopped by SIGTERM {where}") from None
        finally:
            job.executor.stop.is_armed = False


def newest_checkpoint(run: Path) -> str:
    """In words, with how to go on."""
    found = checkpoints_in(run)
    return (
        f"the newest whole checkpoint is {found[0]} (go on with --load {run})"
        if found
        else "there is no checkpoint yet"
    )


def _checkpoint_of_last_step(job: Job) -> str:
    checkpoints, step = job.checkpoints, job.last_step
    if step == 0:
        return "before the end of the first step; there is no checkpoint yet"
    if not is_savable(job.config):
        return (
            f"after step {step}; there is no checkpoint: the state of --optimizer-cpu-offload "
            "cannot be saved yet"
        )
    job.drop_step()
    if checkpoints.last_step == step:
        checkpoints.wait()
    else:
        checkpoints.save(step)
        checkpoints.wait()
    folder = folder_of_step(job.run.folder, step)
    if not folder.is_dir():  # it was restored from another run, and nothing was done since
        return f"after step {step}, which it was loaded with; go on with --load {job.config.checkpoint.load}"
    return f"after step {step}: its checkpoint is {folder} (go on with --load {job.run.folder})"
