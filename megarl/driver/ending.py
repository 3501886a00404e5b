"""How a driver process ends, whoever started it and its ranks: one message, one exit code, nothing left behind.

SIGINT           the loop is unwound at once, wherever it is
SIGTERM          while a loop runs that stops in order (`limited_stop`): a request, which the loop sees to; at the end of its time, and
                 at the second one, everything ends at once. Else as SIGINT
SIGTERM, a rank  a rank's death: torchrun sends SIGTERM to all others, and rank 0's death is one. So it is asked first who lives
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from megarl.driver.executor import at_step

if TYPE_CHECKING:
    from megarl.driver.store_executor import StoreExecutor

logger = logging.getLogger(__name__)
_UNWIND_S, _OVERTAKE_S, _DEATH_FIRST_S, _EXIT_S, _JUDGED_S = 3.0, 1.0, 0.5, 30.0, 6.0
_SAME_S = 1.0  # a scheduler may send a signal to every process, and torchrun then sends it on
_signals: list[int] = []


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM reached the driver. text: what to say of it, if the job was ended in order."""

    def __init__(self, signum: int, text: str | None = None):
        super().__init__(signum)
        self.signal, self.text = signal.Signals(signum), text


class Processes(Protocol):
    """Of the ranks, where they are this process's children."""

    def expect_end(self) -> None:
        """From now on a rank that ends is nothing to tell."""

    def end(self, wait_s: float) -> None:
        """Give them so long to exit by themselves, then end them."""

    def kill(self) -> None:
        """At once."""


@dataclass
class _Running:
    """The job of this process, for the signal handlers."""

    executor: StoreExecutor | None = None
    processes: Processes | None = None
    parent: int = 0
    """Of this process when the job began; under torchrun rank 0."""
    grace_s: float = 0.0
    newest: Callable[[], str] | None = None
    told: tuple[int | None, str] | None = None
    """Step of the failure, and the first line of what was said of it."""
    has_unwound: threading.Event = field(default_factory=threading.Event)
    judged: threading.Event = field(default_factory=threading.Event)
    """After a request to stop: it is known whether all ranks live."""


_running = _Running()


def last_failure() -> tuple[int | None, str] | None:
    """Step and first line of what `run_to_the_end` has told."""
    return _running.told


def signal_since() -> int | None:
    """A signal that came, also while a job was being ended."""
    return _signals[0] if _signals else None


@contextlib.contextmanager
def limited_stop(grace_s: float, newest: Callable[[], str]) -> Iterator[None]:
    """Around a loop that sees to `executor.stop`: seconds that it has for it; what to say of the checkpoint that there is if it takes longer."""
    _running.grace_s, _running.newest = grace_s, newest
    try:
        yield
    finally:
        _running.newest = None


def run_to_the_end(
    main: Callable[[StoreExecutor], object],
    connect: Callable[[], StoreExecutor],
    processes: Processes | None = None,
) -> int:
    """Run `main(connect())`, then shut the workers down.

    Whatever goes wrong, one message goes to stderr: the first failure of any rank, else the driver's own error, else where the job
    was when a signal ended it. By then `main` has unwound, so its files are closed and its live display is gone.

    Args:
        processes: the ranks, if nobody else ends them.
    Returns: the exit code: 0; 1; 2 for a ValueError before the first call, which is about the user's input and shown without its
        traceback; 128 + n after signal n (130: Ctrl-C).
    """
    global _running
    executor, _running = None, _Running(processes=processes, parent=os.getppid())
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    try:
        if (signum := signal_since()) is not None:  # between two attempts, where nobody heeds one
            raise Stopped(signum)
        _running.executor = executor = connect()
        # A dead rank makes the collectives of its peers raise; by the time its death is known to all it is known why.
        executor.death_first_s, executor.is_ending, executor.on_terminated = (
            _DEATH_FIRST_S,
            _is_ending,
            _terminate,
        )
        main(executor)
        executor.shutdown()
        if processes is not None:
            processes.end(_EXIT_S)
        _running.has_unwound.set()
        return 0
    except BaseException as error:  # process boundary
        _ignore_signals()
        _running.has_unwound.set()
        if processes is not None:
            processes.expect_end()  # before they hear of it: an interrupt may have left the executor locked for those who would tell it
        sys.stdout.flush()
        explanation = _explain(error, executor)
        _running.told = None if executor is None else executor.step, explanation.splitlines()[0]
        sys.stderr.write(explanation + "\n")
        sys.stderr.flush()
        code = _exit_code(error, executor)
        _abort(executor, code)
        if processes is not None:
            processes.end(0.0)
        return code


def _exit_code(error: BaseException, executor: StoreExecutor | None) -> int:
    if executor is not None and executor.failure is not None:
        return 1
    if isinstance(error, Stopped):
        return 128 + error.signal
    return 2 if _is_about_input(error, executor) else 1


def _is_about_input(error: BaseException, executor: StoreExecutor | None) -> bool:
    return isinstance(error, ValueError) and (executor is None or executor.num_calls == 0)


def _explain(error: BaseException, executor: StoreExecutor | None) -> str:
    if executor is not None and executor.failure is not None:
        return str(executor.failure)
    if _is_about_input(error, executor):
        return str(error)
    where = "before the workers were reached" if executor is None else executor.where()
    if isinstance(error, Stopped):
        if error.text is not None:
            return error.text
        return (
            f"[driver] interrupted {where}"
            if error.signal == signal.SIGINT
            else f"[driver] stopped by {error.signal.name}{_reason()} {where}"
        )
    last = "".join(traceback.format_exception_only(error)).strip()
    step = None if executor is None else executor.step
    return f"[driver] failed{at_step(step)}: {last}\n{''.join(traceback.format_exception(error)).rstrip()}"


def _abort(executor: StoreExecutor | None, exit_code: int) -> None:
    if executor is None:
        return
    try:
        executor.abort(exit_code)
    except RuntimeError as error:  # the store is gone, and with it whoever would read this
        logger.debug("could not tell the workers: %s", error)


def _reason() -> str:
    """Of a SIGTERM."""
    if _running.processes is not None:
        return ""
    return " (rank 0 has died)" if _is_orphan() else " (a worker died, or torchrun was told to stop)"


def _is_orphan() -> bool:
    """The kernel also sends SIGTERM when rank 0, which has started this process, ends."""
    return _running.processes is None and os.getppid() != _running.parent


def _is_ending() -> bool:
    """Whether what a rank raises is of no interest: of a signal the consequences. Waits until that is known."""
    if not _signals:
        return False
    if _running.executor.stop.requested_at is None:
        return True
    _running.judged.wait(_JUDGED_S)
    return _running.executor.failure is not None


def _terminate() -> None:
    """A rank has got SIGTERM. So has the driver, if that comes from torchrun on this machine."""
    if not _signals:
        os.kill(os.getpid(), signal.SIGTERM)


def _stop(signum: int, frame: FrameType | None) -> None:
    """First signal: unwind `main`, but not for longer than _UNWIND_S. The others, e.g. of rank 0's death just after, say nothing new.

    Ctrl-C also kills rank 0, whose death is a SIGTERM here. It may come first, so it waits for a SIGINT to overtake it; or while
    this function is at work on the SIGINT, which then goes on.
    """
    _signals.append(signum)
    if signum == signal.SIGTERM:
        if any(outer.f_code is _stop.__code__ for outer, _ in traceback.walk_stack(frame)) or _is_seen_to():
            return
        signal.signal(signal.SIGTERM, _nothing)
        if _running.processes is None:
            time.sleep(_OVERTAKE_S)
    _ignore_signals()
    threading.Thread(
        target=_limit_unwinding, args=(128 + signum,), name="limit_unwinding", daemon=True
    ).start()
    raise Stopped(signum)


def _is_seen_to() -> bool:
    """Whether a SIGTERM is a request that the loop sees to, or has seen already."""
    executor = _running.executor
    if executor is None or not executor.stop.is_armed or _is_orphan():
        return False
    if (since := executor.stop.requested_at) is not None:
        return time.monotonic() - since < _SAME_S
    executor.stop.request()
    threading.Thread(target=_see_to_the_stop, args=(_running,), name="see_to_the_stop", daemon=True).start()
    return True


def _see_to_the_stop(job: _Running) -> None:
    """That all ranks live, and that it does not take too long."""
    start, executor = time.monotonic(), job.executor
    executor.wake()
    if missing := executor.ask_who_lives():
        named = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        executor.fail(
            RuntimeError(f"[driver] stopped by SIGTERM {executor.where()}, with no sign of life from {named}")
        )
    job.judged.set()
    if not job.has_unwound.wait(max(0.0, start + job.grace_s - time.monotonic())):
        newest = "" if job.newest is None else f"; {job.newest()}"
        sys.stderr.write(
            f"[driver] stopped by SIGTERM {executor.where()}, as --exit-grace-s ({job.grace_s:g}) is over{newest}\n"
        )
        sys.stderr.flush()
        _leave(128 + signal.SIGTERM, job)


def _limit_unwinding(code: int) -> None:
    if not _running.has_unwound.wait(_UNWIND_S):
        _leave(code, _running)


def _leave(code: int, job: _Running) -> None:
    """At once, with all ranks."""
    try:
        if job.processes is not None:
            job.processes.kill()
        elif job.executor is not None:
            _abort(job.executor, code)
    finally:
        os._exit(code)


def _ignore_signals() -> None:
    signal.signal(signal.SIGINT, _nothing)
    signal.signal(signal.SIGTERM, _nothing)


def _nothing(signum: int, frame: FrameType | None) -> None:
    """Not SIG_IGN: Python complains on stderr when a signal that came before finds its handler gone."""
    _signals.append(signum)
