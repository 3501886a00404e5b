"""Shut down a driver process with one message and one exit code, and leave no rank process behind.

    running    SIGTERM or SIGHUP, within `graceful_shutdown`           -> stopping
    running    SIGINT; SIGTERM without such a loop                     -> unwinding: Stopped is raised, once
    stopping   another SIGTERM: changes nothing
    stopping   SIGINT; the death of rank 0 under torchrun              -> unwinding
    stopping   --exit-grace-s is over                                  -> ended
    unwinding  every signal: changes nothing
    unwinding  the main thread is back, or 3 s are over                -> ended
    ended      every signal: changes nothing, also while the interpreter shuts down

The thread that brings the job into `ended` claims it first (`_Running.claim`), prints the one message and
sets the exit code. A signal handler takes no lock and starts no thread, because it may interrupt the main
thread while that holds threading's own locks.

When a rank receives SIGTERM, the driver sends itself the same signal. torchrun sends SIGTERM to all other
ranks when a rank dies, and rank 0's death is a SIGTERM to the driver beside it. The driver therefore first
checks which ranks live."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import TypeVar

from megarl.runtime.end_message import EndNotes, driver_error_text, failure_text
from megarl.runtime.executor import Executor, ProcessExecutor
from megarl.runtime.process import ignore_signals_for_good
from megarl.runtime.shutdown_interfaces import Processes, ShutdownRequest

logger = logging.getLogger(__name__)
E = TypeVar("E", bound=ProcessExecutor)
_UNWIND_S, _OVERTAKE_S, _DEATH_FIRST_S, _EXIT_S, _JUDGED_S, _KILL_S = 3.0, 1.0, 0.5, 30.0, 6.0, 2.0
_signals: list[int] = []
_HANDLED = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # by nohup
    _HANDLED.pop()


class Stopped(KeyboardInterrupt):
    """Raised in the driver after SIGINT, SIGTERM or SIGHUP. A graceful shutdown ends with the message
    `text`."""

    def __init__(self, signum: int, text: str | None = None):
        super().__init__(signum)
        self.signal, self.text = signal.Signals(signum), text


@dataclass
class _Running:
    """The state of this process's job as signal handlers need it: executor, ranks, shutdown request,
    deadline."""

    executor: Executor | None = None
    processes: Processes | None = None
    rank_0: int | None = None
    """Process id of rank 0, which has started this process under torchrun. Its death is a SIGTERM."""
    request: ShutdownRequest | None = None
    grace_s: float = 0.0
    notes: EndNotes = EndNotes()
    save_records: Callable[[], None] | None = None
    """Writes the records of the run that are still in memory, if the main thread cannot do so."""
    reported: tuple[str | None, str] | None = None
    """Label of the failure ("step 3"), and the first line of its message."""
    ended_by: int | None = None
    """The signal for which Stopped was raised. It is raised once."""
    has_ended: threading.Event = field(default_factory=threading.Event)
    judged: threading.Event = field(default_factory=threading.Event)
    """Set when, after a request to stop, it is known whether all ranks live."""
    limits: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    """Functions that handlers hand to other threads; `put` may interrupt itself."""
    _claim: threading.Lock = field(default_factory=threading.Lock)

    @property
    def failure(self) -> RuntimeError | None:
        """The first failure of any rank."""
        return None if self.executor is None else self.executor.failure

    @property
    def is_requested(self) -> bool:
        """Whether a graceful shutdown was requested."""
        return self.request is not None and self.request.is_requested

    def claim(self) -> bool:
        """Return True to the first caller, which may then end the job, and False to all others."""
        claimed = self._claim.acquire(blocking=False)
        if claimed:
            self.has_ended.set()
        return claimed

    def start_limits(self) -> None:
        threading.Thread(target=self._run_limits, name="start_limits", daemon=True).start()

    def _run_limits(self) -> None:
        while (limit := self.limits.get()) is not None:
            threading.Thread(target=limit, name="limit_shutdown", daemon=True).start()


_running = _Running()


def last_failure() -> tuple[str | None, str] | None:
    """Return label ("step 3") and first line of the last failure that `run_job` has printed, or None."""
    return _running.reported


def received_signal() -> int | None:
    """Return the first signal that this process received, also while a job was shutting down, or None."""
    return _signals[0] if _signals else None


@contextlib.contextmanager
def graceful_shutdown(
    request: ShutdownRequest, grace_s: float, save_records: Callable[[], None]
) -> Iterator[None]:
    """Let a SIGTERM within this context set `request` instead of ending the loop, which must then end within
    `grace_s` seconds.

    Args:
        grace_s: seconds that the loop has from the request to its end.
        save_records: writes the run's records, called on another thread if the loop takes longer."""
    _running.request, _running.grace_s, _running.save_records = request, grace_s, save_records
    try:
        yield
    finally:
        _running.save_records = None


def run_job(
    main: Callable[[E], object],
    connect: Callable[[], E],
    processes: Processes | None = None,
    notes: EndNotes = EndNotes(),
) -> int:
    """Run `main(connect())` as the driver, end the ranks, and return the exit code. Errors are printed, not
    raised.

    After any error, one message goes to stderr. It is the first failure of any rank, else the driver's own
    error, else the position of the job when a signal ended it. By then `main` has unwound, so its files are
    closed and its live display is gone. When this function returns, signals change nothing any more.

    Args:
        processes: the ranks, if nobody else ends them.
        notes: what the message at the end may refer to.
    Returns: the exit code. 0 is success and 1 a failure. 2 is a ValueError before the first call, which is
    about the user's input and shown without its traceback. 128 + n follows signal n (130: Ctrl-C).
    """
    global _running
    rank_0 = os.getppid() if processes is None else None
    job = _running = _Running(processes=processes, rank_0=rank_0, notes=notes)
    job.start_limits()
    try:
        try:
            _handle_signals(*_HANDLED)
            if (signum := received_signal()) is not None:  # came between two attempts
                raise Stopped(signum)
            if processes is not None:
                processes.on_signal = _act_on_signal_of_rank
            job.executor = executor = connect()
            # A dead rank makes the collectives of its peers raise. The delay lets the death be reported
            # first.
            executor.death_first_s = _DEATH_FIRST_S
            executor.is_shutting_down, executor.on_terminated = _is_shutting_down, _terminate
            main(executor)
            if job.is_requested:
                job.judged.wait(_JUDGED_S)  # ranks that are shut down do not answer, and would pass for dead
            executor.shutdown()
            if processes is not None:
                processes.end(_EXIT_S)
        finally:
            _ignore_signals()  # a signal can still raise in here, once; the handler below catches it
    except BaseException as error:  # process boundary
        _ignore_signals()
        if job.ended_by is None or isinstance(error, Stopped):
            return _shut_down_after(_first_stop(error), job)
        return _shut_down_after(Stopped(job.ended_by), job)
    else:
        _claim_or_wait(job)
        return 0
    finally:
        job.limits.put(None)


def _shut_down_after(error: BaseException, job: _Running) -> int:
    """Print the message about an error, kill the ranks, and return the exit code."""
    _claim_or_wait(job)
    executor, processes = job.executor, job.processes
    if processes is not None:
        # an interrupt may have left the executor locked, which would block reports of deaths
        processes.expect_end()
    sys.stdout.flush()
    explanation, code = _verdict(error, job)
    job.reported = None if executor is None else executor.label, explanation.splitlines()[0]
    _print(explanation)
    _kill_workers(executor, code)
    if processes is not None:
        processes.end(0.0)
    return code


def _claim_or_wait(job: _Running) -> None:
    """Return if the main thread is to end the job, else block until another thread ends the process."""
    if not job.claim():
        threading.Event().wait()


def run_job_in_process(
    main: Callable[[Executor], object],
    ranks: Callable[[], contextlib.AbstractContextManager[Executor]],
    notes: EndNotes = EndNotes(),
) -> int:
    """Run `main` on an executor whose roles are objects of this process. Returns 0 or, after a signal, 128 +
    n; errors are raised.

    SIGTERM means the same as elsewhere. Ctrl-C stays a KeyboardInterrupt until it arrives here, as a debugger
    needs it. An error is raised.

    Returns: 0, or 128 + n after signal n, which is reported in one line."""
    global _running
    job = _running = _Running(notes=notes)
    job.judged.set()  # the only rank is this process
    job.start_limits()
    try:
        try:
            _handle_signals(*_HANDLED[1:])
            with ranks() as executor:
                job.executor = executor
                main(executor)
        finally:
            _ignore_signals()
    except KeyboardInterrupt as error:
        _ignore_signals()
        _claim_or_wait(job)
        first = _first_stop(error)
        text, code = _verdict(first if isinstance(first, Stopped) else Stopped(signal.SIGINT), job)
        _print(text)
        return code
    else:
        return 0
    finally:
        job.claim()
        job.limits.put(None)


def _first_stop(error: BaseException) -> BaseException:
    """Return the first of several KeyboardInterrupts, each raised by a signal while the previous one unwound;
    else the error itself."""
    while isinstance(error, KeyboardInterrupt) and isinstance(error.__context__, KeyboardInterrupt):
        error = error.__context__
    return error


def _verdict(error: BaseException, job: _Running) -> tuple[str, int]:
    """Return the message about the end of a job, and its exit code."""
    executor = job.executor
    if job.failure is not None:
        return failure_text(job.failure, executor, job.notes), 1
    if isinstance(error, Stopped):
        where = "before the workers were reached" if executor is None else executor.where()
        text = f"[driver] interrupted {where}"
        if error.signal != signal.SIGINT:
            text = f"[driver] stopped by {error.signal.name}{_reason(job)} {where}"
        return (error.text or text) + job.notes.after_signal(executor), 128 + error.signal
    if isinstance(error, ValueError) and (executor is None or executor.num_calls == 0):
        return str(error), 2
    return driver_error_text(error, executor, job.notes), 1


def _print(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _kill_workers(executor: Executor | None, exit_code: int) -> None:
    if executor is None:
        return
    try:
        executor.kill(exit_code)
    except RuntimeError as error:  # the store is gone, and nobody could read the message
        logger.debug("could not tell the workers: %s", error)


def _reason(job: _Running) -> str:
    """Return the likely cause of a SIGTERM under torchrun, for the message; "" without torchrun."""
    if job.rank_0 is None:
        return ""
    return " (rank 0 has died)" if _is_orphan(job) else " (a worker died, or torchrun was told to stop)"


def _is_orphan(job: _Running) -> bool:
    """Return whether rank 0, which has started this driver process, has ended."""
    return job.rank_0 is not None and os.getppid() != job.rank_0


def _is_shutting_down() -> bool:
    """Return whether a rank's error is the consequence of a signal, so that it is not reported. Waits until
    that is known."""
    if not _signals:
        return False
    if not _running.is_requested:
        return True
    _running.judged.wait(_JUDGED_S)
    return _running.failure is not None


def _terminate() -> None:
    """Send this driver process the SIGTERM that a rank has received, unless the driver received one too."""
    if not _signals:
        os.kill(os.getpid(), signal.SIGTERM)


def _act_on_signal_of_rank(signum: int) -> bool:
    """Send this driver process the signal that has ended a rank. Returns whether that signal ends the job.

    During a graceful shutdown no rank may end by SIGTERM."""
    if signum == signal.SIGTERM and _running.executor is not None and _running.is_requested:
        return False
    if signum not in _signals:
        os.kill(os.getpid(), signum)
    return True


# ------------------------------------------------------------------ signal handlers: the main thread, between
# any two instructions


def _handle_signals(*signums: int) -> None:
    atexit.register(ignore_signals_for_good)  # the interpreter's shutdown removes Python handlers
    for signum in signums:
        signal.signal(signum, _stop)


def _stop(signum: int, frame: FrameType | None) -> None:
    """Handle SIGINT or SIGTERM: set the request for a graceful shutdown, or raise Stopped.

    SIGHUP means the same as SIGTERM.

    Ctrl-C under torchrun also kills rank 0, whose death is a SIGTERM here. If the SIGTERM comes first, this
    handler waits for a SIGINT to overtake it. If the SIGTERM comes while this handler works on the SIGINT,
    that work continues."""
    job = _running
    if signum == signal.SIGHUP:  # a terminal that is gone can be written to no more
        for descriptor in (1, 2):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    if signum != signal.SIGINT:
        is_request = any(
            outer.f_code is _stop.__code__ for outer, _ in traceback.walk_stack(frame)
        ) or _make_request(job)
        _signals.append(signum)  # after the request is made: `_is_shutting_down` reads both
        if is_request:
            return
        if job.rank_0 is not None and job.ended_by is None:
            time.sleep(_OVERTAKE_S)
    else:
        _signals.append(signum)
    if job.ended_by is None and not job.has_ended.is_set():
        job.ended_by = signum
        job.limits.put(partial(_limit_unwinding, job, signum))
        raise Stopped(signum)


def _make_request(job: _Running) -> bool:
    """Request a graceful shutdown after a SIGTERM. Returns False if the loop cannot handle one."""
    executor = job.executor
    if executor is None or _is_orphan(job):
        return False
    if job.is_requested:
        return True
    if job.request is None or not job.request.is_armed:
        return False
    job.request.request()
    deadline = time.monotonic() + job.grace_s
    job.limits.put(partial(_see_who_lives, job, executor))
    job.limits.put(partial(_limit_stop, job, executor, deadline))
    return True


def _ignore_signals() -> None:
    for signum in _HANDLED:
        signal.signal(signum, _nothing)


def _nothing(signum: int, frame: FrameType | None) -> None:
    """Record a signal without acting on it. The next attempt checks for one; SIG_IGN would lose it."""
    _signals.append(signum)


# ------------------------------------------------------------------ functions on separate threads


def _see_who_lives(job: _Running, executor: Executor) -> None:
    executor.wake()
    missing: list[int] = []
    with contextlib.suppress(RuntimeError):  # the store is gone, which the main thread reports
        missing = executor.dead_ranks()
    if missing:
        named = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        executor.fail(
            RuntimeError(f"[driver] stopped by SIGTERM {executor.where()}, with no sign of life from {named}")
        )
    job.judged.set()


def _limit_stop(job: _Running, executor: Executor, deadline: float) -> None:
    if not job.has_ended.wait(max(0.0, deadline - time.monotonic())) and job.claim():
        _print(
            f"[driver] stopped by SIGTERM {executor.where()}, as --exit-grace-s "
            f"({job.grace_s:g}) is over{job.notes.after_signal(executor)}"
        )
        _exit_now(128 + signal.SIGTERM, job)


def _limit_unwinding(job: _Running, signum: int) -> None:
    if not job.has_ended.wait(_UNWIND_S) and job.claim():
        text, code = _verdict(Stopped(signum), job)
        _print(text)
        _exit_now(code, job)


def _exit_now(code: int, job: _Running) -> None:
    """Write the records, kill all ranks, and end this process at once with the exit code."""
    try:
        if job.save_records is not None:
            saving = threading.Thread(target=job.save_records, daemon=True)
            saving.start()
            saving.join(_KILL_S)  # the disk may hang
        if job.processes is not None:
            job.processes.kill()
        elif job.executor is not None:
            killing = threading.Thread(target=_kill_workers, args=(job.executor, code), daemon=True)
            killing.start()
            killing.join(_KILL_S)  # the store may hang
    finally:
        os._exit(code)
