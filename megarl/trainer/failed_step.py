"""Keep the samples of a step that failed, for `megarl show RUN --failed`.

They are in a file of their own in the run folder, as rollouts/ holds steps that were trained on. The driver
has the texts already, so that nothing is asked of ranks that may be gone."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megarl.failures import last_line
from megarl.files.writing import writing
from megarl.loggers.json_lines import FAILED_STEP
from megarl.runtime.executor import RemoteError
from megarl.trainer.run_folder import Run
from megarl.trainer.state import TrainState
from megarl.trainer.step_batches import StepBatches
from megarl.trainer.step_report import rollout_rows

_WRITE_S = 3.0  # a file system that hangs must not delay the message about the failure


def save_failed_step(run: Run, batches: StepBatches, state: TrainState, error: BaseException) -> None:
    """Replace the run folder's failed_step.jsonl by the samples of the running step whose texts the driver
    has. A step that failed before its samples were scored leaves the file as it is.

    Raises nothing, and returns within a few seconds, because the error of the step must be shown. A failure
    to write is noted in a line."""
    if not state.in_step or run.is_superseded or batches.step != state.step:
        return  # no step is running, or it failed before it had a batch
    path = run.folder / FAILED_STEP
    problems = [f"not written within {_WRITE_S:g} s"]

    def write() -> None:
        try:
            if rows := rollout_rows(batches, state):
                _write(path, state.step, rows, error)
            problems.clear()
        except Exception as problem:  # thread boundary
            problems[:] = [last_line(problem)]

    writer = threading.Thread(target=write, name="write_failed_step", daemon=True)
    writer.start()
    writer.join(_WRITE_S)
    for problem in problems[:1]:
        with contextlib.suppress(OSError, ValueError):  # stdout may be closed
            run.progress.note(f"the samples of the failed step are lost: {path}: {problem}")


def _write(path: Path, step: int, rows: Sequence[Mapping[str, object]], error: BaseException) -> None:
    reason = (str(error) if isinstance(error, RemoteError) else last_line(error)).splitlines()[0]
    head = {"step": step, "error": reason}
    partial = path.with_name(f".{path.name}.new")
    try:
        with writing(path), open(partial, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({**head, **row}, ensure_ascii=False) + "\n" for row in rows)
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def how_to_see_samples(run: Path) -> Callable[[], str | None]:
    """Return a function for the end of a job. It returns the command that shows the samples of the failed
    step, or None if the job has written none since this call."""
    before = _state_of(run / FAILED_STEP)

    def command() -> str | None:
        if _state_of(run / FAILED_STEP) in (None, before):
            return None
        return f"megarl show {shlex.quote(str(run))} --failed"

    return command


def _state_of(path: Path) -> tuple[int, int] | None:
    """Return inode and modification time of a file, which change when the file is replaced; None if there is
    no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
