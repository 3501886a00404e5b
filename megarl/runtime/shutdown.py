"""How a driver process ends, whoever started it and its ranks: one message, one exit code, nothing left
behind.

    running    SIGTERM, and the loop stops in order (`graceful_shutdown`)   -> stopping
    running    SIGINT; SIGTERM without such a loop                     -> unwinding: Stopped is raised, once
    stopping   SIGTERM once more: changes nothing
    stopping   SIGINT; the death of rank 0 under torchrun              -> unwinding
    stopping   --exit-grace-s is over                                  -> ended
    unwinding  every signal: changes nothing
    unwinding  the main thread is back, or 3 s are over                -> ended
    ended      every signal: changes nothing, also while the interpreter shuts down

Who brings the job into `ended` claims it first (`_Running.claim`), tells the one message and sets the exit
code. A signal handler takes no lock and starts no thread: the main thread may be interrupted while it holds
threading's own locks.

To a rank's SIGTERM the driver answers with the same: torchrun sends one to all other ranks when a rank dies,
and rank 0's death is a SIGTERM to the driver beside it. So the driver asks first who lives."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from megarl.runtime.executor import at_step
from megarl.runtime.process import ignore_signals_for_good

if TYPE_CHECKING:
    from megarl.runtime.inline_executor import InlineExecutor
    from megarl.runtime.store_executor import StoreExecutor

logger = logging.getLogger(__name__)
_UNWIND_S, _OVERTAKE_S, _DEATH_FIRST_S, _EXIT_S, _JUDGED_S, _ABORT_S = 3.0, 1.0, 0.5, 30.0, 6.0, 2.0
_signals: list[int] = []


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM reached the driver. text: what to say of it, if the job was ended in order."""

    def __init__(self, signum: int, text: str | None = None):
        super().__init__(signum)
        self.signal, self.text = signal.Signals(signum), text


class Processes(Protocol):
    """The ranks, where they are this process's children."""

    on_signal: Callable[[int], bool]
    """Called, on another thread, when SIGTERM or SIGINT has ended a rank. Returns whether that ends the job;
    then it is no failure."""

    def expect_end(self) -> None:
        """From now on a rank that ends is nothing to tell."""

    def end(self, wait_s: float) -> None:
        """Give them so long to exit by themselves, then end them."""

    def kill(self) -> None:
        """At once."""


@dataclass
class _Running:
    """The job of this process, for the signal handlers."""

    executor: StoreExecutor | InlineExecutor | None = None
    processes: Processes | None = None
    rank_0: int | None = None
    """Under torchrun the process that has started this one; its death is a SIGTERM."""
    grace_s: float = 0.0
    newest: Callable[[], str] | None = None
    told: tuple[int | None, str] | None = None
    """Step of the failure, and the first line of what was said of it."""
    ended_by: int | None = None
    """The signal that Stopped was raised for. It is raised once."""
    has_ended: threading.Event = field(default_factory=threading.Event)
    judged: threading.Event = field(default_factory=threading.Event)
    """After a request to stop: it is known whether all ranks live."""
    limits: queue.SimpleQueue[Callable[[_Running], None] | None] = field(default_factory=queue.SimpleQueue)
    """What handlers want done on another thread; `put` may interrupt itself."""
    _claim: threading.Lock = field(default_factory=threading.Lock)

    def claim(self) -> bool:
        """Whether the caller is the one that ends the job. Then nobody else does."""
        claimed = self._claim.acquire(blocking=False)
        if claimed:
            self.has_ended.set()
        return claimed

    def start_limits(self) -> None:
        threading.Thread(target=self._run_limits, name="limit_ending", daemon=True).start()

    def _run_limits(self) -> None:
        while (limit := self.limits.get()) is not None:
            threading.Thread(target=limit, args=(self,), name=limit.__name__.strip("_"), daemon=True).start()


_running = _Running()


def last_failure() -> tuple[int | None, str] | None:
    """Step and first line of what `run_job` has told."""
    return _running.told


def received_signal() -> int | None:
    """A signal that came, also while a job was being ended."""
    return _signals[0] if _signals else None


@contextlib.contextmanager
def graceful_shutdown(grace_s: float, newest: Callable[[], str]) -> Iterator[None]:
    """Around a loop that sees to `executor.stop`: seconds that it has for it; what to say of the checkpoint
    that there is if it takes longer."""
    _running.grace_s, _running.newest = grace_s, newest
    try:
        yield
    finally:
        _running.newest = None


def run_job(
    main: Callable[[StoreExecutor], object],
    connect: Callable[[], StoreExecutor],
    processes: Processes | None = None,
) -> int:
    """Run `main(connect())`, then shut the workers down.

    Whatever goes wrong, one message goes to stderr: the first failure of any rank, else the driver's own
    error, else where the job was when a signal ended it. By then `main` has unwound, so its files are closed
    and its live display is gone. When this returns, signals change nothing any more.

    Args:
        processes: the ranks, if nobody else ends them.
    Returns: the exit code: 0; 1; 2 for a ValueError before the first call, which is about the user's input
        and shown without its traceback; 128 + n after signal n (130: Ctrl-C).
    """
    global _running
    job = _running = _Running(processes=processes, rank_0=os.getppid() if processes is None else None)
    job.start_limits()
    try:
        try:
            _handle_signals(signal.SIGINT, signal.SIGTERM)
            if (signum := received_signal()) is not None:  # between two attempts, where nobody heeds one
                raise Stopped(signum)
            if processes is not None:
                processes.on_signal = _act_on_signal_of_rank
            job.executor = executor = connect()
            # A dead rank makes the collectives of its peers raise; by the time its death is known to all it
            # is known why.
            executor.death_first_s, executor.is_shutting_down, executor.on_terminated = (
                _DEATH_FIRST_S,
                _is_shutting_down,
                _terminate,
            )
            main(executor)
            if executor.stop.requested_at is not None:
                job.judged.wait(
                    _JUDGED_S
                )  # ranks that have been shut down do not answer, and would pass for dead
            executor.shutdown()
            if processes is not None:
                processes.end(_EXIT_S)
        finally:
            _ignore_signals()  # a signal can still raise in here, once; then it lands below
    except BaseException as error:  # process boundary
        _ignore_signals()
        return _shut_down_after(
            _first_stop(error)
            if job.ended_by is None or isinstance(error, Stopped)
            else Stopped(job.ended_by),
            job,
        )
    else:
        _claim_or_wait(job)
        return 0
    finally:
        job.limits.put(None)


def _shut_down_after(error: BaseException, job: _Running) -> int:
    """Tell what has happened and end the ranks. Returns the exit code."""
    _claim_or_wait(job)
    executor, processes = job.executor, job.processes
    if processes is not None:
        # before they hear of it: an interrupt may have left the executor locked for those who would tell it
        processes.expect_end()
    sys.stdout.flush()
    explanation, code = _explain(error, job), _exit_code(error, executor)
    job.told = None if executor is None else executor.step, explanation.splitlines()[0]
    _tell(explanation)
    _kill_workers(executor, code)
    if processes is not None:
        processes.end(0.0)
    return code


def _claim_or_wait(job: _Running) -> None:
    """Returns only if the main thread is the one that ends the job: else a limit does, with `os._exit`."""
    if not job.claim():
        threading.Event().wait()


def run_job_in_process(
    main: Callable[[InlineExecutor], object],
    ranks: Callable[[], contextlib.AbstractContextManager[InlineExecutor]],
) -> int:
    """Run `main` where the roles are objects of this process. SIGTERM means what it means elsewhere; Ctrl-C
    stays a KeyboardInterrupt until it arrives here, as a debugger wants it; an error is raised.

    Returns: 0, or 128 + n after signal n, which is told in one line."""
    global _running
    job = _running = _Running()
    job.judged.set()  # the only rank is this process
    job.start_limits()
    try:
        try:
            _handle_signals(signal.SIGTERM)
            with ranks() as executor:
                job.executor = executor
                main(executor)
        finally:
            _ignore_signals()
    except KeyboardInterrupt as error:
        _ignore_signals()
        _claim_or_wait(job)
        first = _first_stop(error)
        stopped = first if isinstance(first, Stopped) else Stopped(signal.SIGINT)
        _tell(_explain(stopped, job))
        return _exit_code(stopped, job.executor)
    else:
        return 0
    finally:
        job.claim()
        job.limits.put(None)


def _first_stop(error: BaseException) -> BaseException:
    """Of several signals that raised, one while the other unwound, the first."""
    while isinstance(error, KeyboardInterrupt) and isinstance(error.__context__, KeyboardInterrupt):
        error = error.__context__
    return error


def _exit_code(error: BaseException, executor: StoreExecutor | None) -> int:
    if executor is not None and executor.failure is not None:
        return 1
    if isinstance(error, Stopped):
        return 128 + error.signal
    return 2 if _is_about_input(error, executor) else 1


def _is_about_input(error: BaseException, executor: StoreExecutor | None) -> bool:
    return isinstance(error, ValueError) and (executor is None or executor.num_calls == 0)


def _explain(error: BaseException, job: _Running) -> str:
    executor = job.executor
    if executor is not None and executor.failure is not None:
        return str(executor.failure)
    if isinstance(error, Stopped):
        if error.text is not None:
            return error.text
        where = "before the workers were reached" if executor is None else executor.where()
        if error.signal == signal.SIGINT:
            return f"[driver] interrupted {where}"
        return f"[driver] stopped by {error.signal.name}{_reason(job)} {where}"
    if _is_about_input(error, executor):
        return str(error)
    last = "".join(traceback.format_exception_only(error)).strip()
    step = None if executor is None else executor.step
    return f"[driver] failed{at_step(step)}: {last}\n{''.join(traceback.format_exception(error)).rstrip()}"


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _kill_workers(executor: StoreExecutor | None, exit_code: int) -> None:
    if executor is None:
        return
    try:
        executor.kill(exit_code)
    except RuntimeError as error:  # the store is gone, and with it whoever would read this
        logger.debug("could not tell the workers: %s", error)


def _reason(job: _Running) -> str:
    """Why a SIGTERM came, as far as it is known."""
    if job.rank_0 is None:
        return ""
    return " (rank 0 has died)" if _is_orphan(job) else " (a worker died, or torchrun was told to stop)"


def _is_orphan(job: _Running) -> bool:
    """The kernel also sends SIGTERM when rank 0, which has started this process, ends."""
    return job.rank_0 is not None and os.getppid() != job.rank_0


def _is_shutting_down() -> bool:
    """Whether what a rank raises is of no interest: of a signal the consequences. Waits until that is
    known."""
    if not _signals:
        return False
    if _running.executor.stop.requested_at is None:
        return True
    _running.judged.wait(_JUDGED_S)
    return _running.executor.failure is not None


def _terminate() -> None:
    """A rank has got SIGTERM. So has the driver, or it is to act as if it had."""
    if not _signals:
        os.kill(os.getpid(), signal.SIGTERM)


def _act_on_signal_of_rank(signum: int) -> bool:
    """It has ended a rank, which was still starting, say. One that has agreed to stop in order may not end by
    SIGTERM."""
    if (
        signum == signal.SIGTERM
        and _running.executor is not None
        and _running.executor.stop.requested_at is not None
    ):
        return False
    if signum not in _signals:
        os.kill(os.getpid(), signum)
    return True


# ------------------------------------------------------------------ signal handlers: the main thread, between
# any two instructions


def _handle_signals(*signums: int) -> None:
    atexit.register(
        ignore_signals_for_good
    )  # the interpreter's shutdown puts the default back where a handler of ours is
    for signum in signums:
        signal.signal(signum, _stop)


def _stop(signum: int, frame: FrameType | None) -> None:
    """Ask the loop to stop, or raise Stopped; see the head of this file.

    Ctrl-C under torchrun also kills rank 0, whose death is a SIGTERM here. It may come first, so it waits for
    a SIGINT to overtake it; or while this function is at work on the SIGINT, which then goes on."""
    job = _running
    if signum == signal.SIGTERM:
        is_seen_to = any(
            outer.f_code is _stop.__code__ for outer, _ in traceback.walk_stack(frame)
        ) or _is_seen_to(job)
        _signals.append(signum)  # now that the request is made: `_is_shutting_down` looks at both
        if is_seen_to:
            return
        if job.rank_0 is not None and job.ended_by is None:
            time.sleep(_OVERTAKE_S)
    else:
        _signals.append(signum)
    if job.ended_by is None and not job.has_ended.is_set():
        job.ended_by = signum
        job.limits.put(_limit_unwinding)
        raise Stopped(signum)


def _is_seen_to(job: _Running) -> bool:
    """Whether a SIGTERM is a request that the loop sees to, or has seen already."""
    executor = job.executor
    if executor is None or _is_orphan(job):
        return False
    if executor.stop.requested_at is not None:
        return True
    if not executor.stop.is_armed:
        return False
    executor.stop.request()
    job.limits.put(_see_who_lives)
    job.limits.put(_limit_stop)
    return True


def _ignore_signals() -> None:
    signal.signal(signal.SIGINT, _nothing)
    signal.signal(signal.SIGTERM, _nothing)


def _nothing(signum: int, frame: FrameType | None) -> None:
    """Not SIG_IGN: the next attempt asks whether a signal came."""
    _signals.append(signum)


# ------------------------------------------------------------------ on threads of their own


def _see_who_lives(job: _Running) -> None:
    executor = job.executor
    executor.wake()
    if missing := executor.ask_who_lives():
        named = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        executor.fail(
            RuntimeError(f"[driver] stopped by SIGTERM {executor.where()}, with no sign of life from {named}")
        )
    job.judged.set()


def _limit_stop(job: _Running) -> None:
    deadline = job.executor.stop.requested_at + job.grace_s
    if not job.has_ended.wait(max(0.0, deadline - time.monotonic())) and job.claim():
        newest = "" if job.newest is None else f"; {job.newest()}"
        _tell(
            f"[driver] stopped by SIGTERM {job.executor.where()}, as --exit-grace-s "
            f"({job.grace_s:g}) is over{newest}"
        )
        _exit_now(128 + signal.SIGTERM, job)


def _limit_unwinding(job: _Running) -> None:
    if not job.has_ended.wait(_UNWIND_S) and job.claim():
        stopped = Stopped(job.ended_by)
        _tell(_explain(stopped, job))
        _exit_now(_exit_code(stopped, job.executor), job)


def _exit_now(code: int, job: _Running) -> None:
    """At once, with all ranks."""
    try:
        if job.processes is not None:
            job.processes.kill()
        elif job.executor is not None:
            killing = threading.Thread(target=_kill_workers, args=(job.executor, code), daemon=True)
            killing.start()
            killing.join(_ABORT_S)  # the store may hang
    finally:
        os._exit(code)
