"""Graceful shutdown after SIGTERM: the last completed step becomes a checkpoint, within --exit-grace-s."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from megarl.config.rules_files import is_savable
from megarl.files.checkpoints import folder_of_step
from megarl.runtime.shutdown import Stopped, graceful_shutdown
from megarl.trainer.stop_request import StopRequested
from megarl.trainer.trainer import Trainer


@contextlib.contextmanager
def graceful_stop(trainer: Trainer) -> Iterator[None]:
    """Let a SIGTERM within this context abort the running step, save the last completed one, and raise
    Stopped with the message to report."""
    grace_s = trainer.config.checkpoint.exit_grace_s
    with graceful_shutdown(trainer.stop, grace_s, trainer.save_timeline):
        trainer.stops_gracefully = True
        try:
            yield
        except StopRequested:
            with trainer.stop.held():
                trainer.executor.abort_calls()
                where = _save_last_step(trainer)
            raise Stopped(signal.SIGTERM, f"[driver] stopped by SIGTERM {where}") from None
        finally:
            trainer.stop.is_armed = False


def _save_last_step(trainer: Trainer) -> str:
    """Save the last completed step. Returns a text that says where the job has stopped."""
    checkpointer, step, folder = trainer.checkpointer, trainer.state.completed, trainer.run_folder.folder
    if step == 0:
        return "before the end of the first step"
    if not is_savable(trainer.config):
        return f"after step {step}"
    trainer.state.drop_step()
    if checkpointer.last_step != step:
        checkpointer.save()
    checkpointer.wait()
    checkpoint = folder_of_step(folder, step)
    if not checkpoint.is_dir():
        if checkpointer.last_step == step:  # restored from another run, and no step was completed since
            return f"after step {step}, where it began"
        return f"after step {step}, which is not saved, as the replayed run has no checkpoint of it"
    return f"after step {step}: its checkpoint is {checkpoint}"
