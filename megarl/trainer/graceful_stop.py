"""Save the last completed step within --exit-grace-s, after SIGTERM and after a failure that leaves the
weights whole."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

from megarl.config.rules_files import is_savable
from megarl.failures import last_line
from megarl.files.checkpoints import folder_of_step
from megarl.runtime.shutdown import Stopped, graceful_shutdown, received_signal
from megarl.trainer.failed_step import save_failed_step
from megarl.trainer.stop_request import StopRequested
from megarl.trainer.trainer import Trainer


@contextlib.contextmanager
def graceful_stop(trainer: Trainer) -> Iterator[None]:
    """Let a SIGTERM or SIGHUP within this context abort the running step, save the last completed one, and
    raise Stopped with the message to report.

    An error of the driver saves that step too, unless a rank has failed or the running step has begun to
    update a model."""
    grace_s = trainer.config.checkpoint.exit_grace_s
    with graceful_shutdown(trainer.stop, grace_s, trainer.save_timeline):
        trainer.stops_gracefully = True
        try:
            yield
        except StopRequested:
            with trainer.stop.held():
                trainer.executor.abort_calls()
                where = _save_last_step(trainer)
            signum = signal.Signals(received_signal() or signal.SIGTERM)
            raise Stopped(signum, f"[driver] stopped by {signum.name} {where}") from None
        except Exception as error:
            is_whole = trainer.executor.failure is None and not trainer.stop.has_updated
            if trainer.state.completed and is_whole:
                save_failed_step(trainer.run_folder, trainer.runner.batches, trainer.state, error)
                error.add_note(_save_after_failure(trainer, time.monotonic() + grace_s))
            raise
        finally:
            trainer.stop.is_armed = False


def _save_after_failure(trainer: Trainer, deadline: float) -> str:
    """Save the last completed step, and return a text that says where it is or why it is not saved."""

    def check() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError("--exit-grace-s is over")

    trainer.executor.check_interrupt = check
    try:
        trainer.executor.abort_calls()
        return f"Stopped {_save_last_step(trainer)}"
    except Exception as problem:  # the failure itself must be reported, not this one
        trainer.executor.failure = None
        return f"Step {trainer.state.completed} could not be saved: {last_line(problem)}"


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
