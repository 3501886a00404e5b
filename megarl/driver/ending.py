"""How a driver process ends, whoever started it and its ranks: one message, one exit code, nothing left behind."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from megarl.driver.executor import at_step

if TYPE_CHECKING:
    from megarl.driver.store_executor import StoreExecutor

logger = logging.getLogger(__name__)
_UNWIND_S, _OVERTAKE_S, _DEATH_FIRST_S, _EXIT_S = 3.0, 1.0, 0.5, 30.0
_signals: list[int] = []
_has_unwound = threading.Event()


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM reached the driver."""

    def __init__(self, signum: int):
        super().__init__(signum)
        self.signal = signal.Signals(signum)


class Processes(Protocol):
    """Of the ranks, where they are this process's children."""

    def expect_end(self) -> None:
        """From now on a rank that ends is nothing to tell."""

    def end(self, wait_s: float) -> None:
        """Give them so long to exit by themselves, then end them."""


def run_to_the_end(main: Callable[[StoreExecutor], object], connect: Callable[[], StoreExecutor], processes: Processes | None = None) -> int:
    """Run `main(connect())`, then shut the workers down.

    Whatever goes wrong, one message goes to stderr: the first failure of any rank, else the driver's own error, else where the job
    was when a signal ended it. By then `main` has unwound, so its files are closed and its live display is gone.

    Args:
        processes: the ranks, if nobody else ends them.
    Returns: the exit code: 0; 1; 2 for a ValueError before the first call, which is about the user's input and shown without its
        traceback; 128 + n after signal n (130: Ctrl-C).
    """
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    executor = None
    try:
        executor = connect()
        # A dead rank makes the collectives of its peers raise; by the time its death is known to all it is known why.
        executor.death_first_s, executor.is_ending = _DEATH_FIRST_S, lambda: bool(_signals)
        main(executor)
        executor.shutdown()
        if processes is not None:
            processes.end(_EXIT_S)
        return 0
    except BaseException as error:  # process boundary
        _ignore_signals()
        _has_unwound.set()
        if processes is not None:
            processes.expect_end()  # before the ranks hear of it: an interrupt may have left the executor locked for those who would tell it
        sys.stdout.flush()
        sys.stderr.write(_explain(error, executor) + "\n")
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
        if error.signal == signal.SIGINT:
            return f"[driver] interrupted {where}"
        return f"[driver] stopped by {error.signal.name} (a worker died, or torchrun was told to stop) {where}"
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


def _stop(signum: int, frame: FrameType | None) -> None:
    """First signal: unwind `main`, but not for longer than _UNWIND_S. The others, e.g. of rank 0's death just after, say nothing new.

    Ctrl-C also kills rank 0, whose death is a SIGTERM here. It may come first, so it waits for a SIGINT to overtake it; or while
    this function is at work on the SIGINT, which then goes on.
    """
    _signals.append(signum)
    if signum == signal.SIGTERM:
        if any(outer.f_code is _stop.__code__ for outer, _ in traceback.walk_stack(frame)):
            return
        signal.signal(signal.SIGTERM, _nothing)
        time.sleep(_OVERTAKE_S)
    _ignore_signals()
    threading.Thread(target=_limit_unwinding, args=(128 + signum,), name="limit_unwinding", daemon=True).start()
    raise Stopped(signum)


def _limit_unwinding(code: int) -> None:
    if not _has_unwound.wait(_UNWIND_S):
        os._exit(code)


def _ignore_signals() -> None:
    signal.signal(signal.SIGINT, _nothing)
    signal.signal(signal.SIGTERM, _nothing)


def _nothing(signum: int, frame: FrameType | None) -> None:
    """Not SIG_IGN: Python complains on stderr when a signal that came before finds its handler gone."""
