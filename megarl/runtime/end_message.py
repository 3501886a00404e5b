"""Word the driver's last message: what failed first, on which rank, at which step, and where to read on."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megarl.failures import ExplainedError, last_line
from megarl.files.writing import writing
from megarl.runtime.executor import Executor, RemoteError, at_label

SHOW_TRACEBACKS = "MEGARL_TRACEBACK"
"""Environment variable: with the value 1 every failure is shown with its traceback."""


@dataclass(frozen=True)
class EndNotes:
    """The places that the driver's last message names: a log for tracebacks, and a command that resumes the
    job.

    Args:
        failure_log: file to which the traceback of a failure is appended if the message leaves it out. It is
            written only if the job has begun a step, so that a job that could not start leaves nothing.
        how_to_resume: returns the lines to add after SIGTERM or Ctrl-C. The argument is whether a step had
            begun.
        how_to_see_samples: returns the command that shows the samples of the step that failed, or None if
            there are none."""

    failure_log: Path | None = None
    how_to_resume: Callable[[bool], str] | None = None
    how_to_see_samples: Callable[[], str | None] | None = None

    def after_signal(self, executor: Executor | None) -> str:
        """Return the lines about resuming, each with a line break before it; "" if there are none."""
        if self.how_to_resume is None:
            return ""
        with contextlib.suppress(OSError):  # the message itself must not fail
            return f"\n{self.how_to_resume(_has_begun(executor))}"
        return ""

    def after_failure(self) -> str:
        """Return the line about the samples of the failed step, with a line break before it; "" without
        samples."""
        command = None if self.how_to_see_samples is None else self.how_to_see_samples()
        return "" if command is None else f"\nTo see what the model said in this step: {command}"


def failure_text(failure: RuntimeError, executor: Executor | None, notes: EndNotes) -> str:
    """Return the message about the first failure of any rank."""
    if not isinstance(failure, RemoteError) or failure.read_on is None:
        return str(failure) + notes.after_failure()
    head = str(failure).removesuffix(f"\n{failure.remote_traceback}")
    text = _explained(head, failure.remote_traceback, failure.read_on, executor, notes)
    return text + notes.after_failure()


def driver_error_text(error: BaseException, executor: Executor | None, notes: EndNotes) -> str:
    """Return the message about an error of the driver itself."""
    when = "" if executor is None else at_label(executor.label)
    whole = "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, ExplainedError):
        head = "\n".join([f"[driver] failed{when}: {last_line(error)}", *getattr(error, "__notes__", ())])
        return _explained(head, whole, error.read_on, executor, notes) + notes.after_failure()
    last = traceback.format_exception_only(error)[0].strip()
    return f"[driver] failed{when}: {last}\n{whole}{notes.after_failure()}"


def _explained(head: str, details: str, read_on: str, executor: Executor | None, notes: EndNotes) -> str:
    if os.environ.get(SHOW_TRACEBACKS) == "1":
        return f"{head}\n{details}\nRead on in {read_on}."
    if notes.failure_log is not None and _has_begun(executor):
        with contextlib.suppress(OSError):  # as on a full disk; the message is shown in any case
            _append(notes.failure_log, f"{head}\n{details}\n")
            return f"{head}\nRead on in {read_on}. megarl's own traceback is in {notes.failure_log}."
    # the message itself may hold the traceback of a reward function
    return (
        f"{head}\nRead on in {read_on}. {SHOW_TRACEBACKS}=1 in the environment shows megarl's own traceback."
    )


def _append(log: Path, text: str) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with writing(log), open(log, "a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def _has_begun(executor: Executor | None) -> bool:
    """Return whether the job has begun its first step."""
    return executor is not None and executor.label is not None
