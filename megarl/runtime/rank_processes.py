"""Start the rank processes of one machine, report those that die, and end them.

An executor with ranks on several machines has one RankProcesses on each of them. This module imports no
torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from megarl.runtime.store_executor import StoreExecutor

_KILL_S, _CHILDREN_S = 10.0, 2.0


@contextlib.contextmanager
def undisturbed(is_interrupt: bool) -> Iterator[None]:
    """Delay the user program's handlers of SIGINT and SIGTERM until this context ends, so that the ranks are
    gone first.

    Args:
        is_interrupt: drop another Ctrl-C."""
    # signal handlers run on the main thread alone
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {int(signum): signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    handlers = {signum: handler for signum, handler in found.items() if callable(handler)}
    came: list[int] = []
    for signum in handlers:
        signal.signal(signum, lambda signum, frame: came.append(signum))
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        if came and not (is_interrupt and came[0] == signal.SIGINT):
            handlers[came[0]](came[0], None)


class RankDied(RuntimeError):
    """A rank ended unexpectedly. If `is_kill` is True, a signal ended it, so it has not reported a cause."""

    def __init__(self, code: int, description: str) -> None:
        """Write the message about the death of a rank from its exit code.

        Args:
            code: exit code as in Popen.
            description: describes the rank, for example "1: actor, critic"."""
        self.code, self.description = code, description
        who = f"[rank {description}]"
        self.is_kill = code < 0
        if code == -signal.SIGKILL:
            super().__init__(
                f"{who} was killed by SIGKILL. If nobody did that, the machine was out of memory (see dmesg)."
            )
        elif self.is_kill:
            super().__init__(f"{who} died of {signal.Signals(-code).name}.")
        else:
            super().__init__(f"{who} ended with exit code {code}; stderr may say why.")

    def at(self, where: str) -> RankDied:
        """Add the position of the job ("at step 3, ...") to the message, and return this error."""
        self.args = (f"{self} The job was {where}.",)
        return self


class JobRanks(Protocol):
    """The processes of all ranks of a job, on one machine or several."""

    on_signal: Callable[[int], bool]

    def start(
        self,
        ranks: dict[str, list[int]],
        call_timeout_s: float,
        interfaces: Mapping[str, type] | None = None,
    ) -> StoreExecutor:
        """Start the processes, and return the executor that reaches them."""

    def expect_end(self) -> None: ...

    def end(self, wait_s: float) -> None: ...

    def kill(self) -> None: ...


class RankProcesses:
    """Starts and ends the processes of some ranks on this machine.

    A thread per rank starts its process and waits for it. The kernel ends a child with the thread that
    started it, and a caller's thread may be short-lived.

    Args:
        command: command line of every rank's process.
        env: environment of the processes, but for RANK and LOCAL_RANK.
        ranks: the ranks in the world. The first of them has LOCAL_RANK 0.
        describe_rank: describes a rank that has died, for example "1: actor, critic".
        tidy_up: removes resources that killed ranks could not remove themselves."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        ranks: Sequence[int],
        describe_rank: Callable[[int], str] = str,
        tidy_up: Callable[[], object] = lambda: None,
    ) -> None:
        self._command, self._env, self._ranks = [*command], dict(env), ranks
        self._describe_rank, self._tidy_up = describe_rank, tidy_up
        self._ending, self._lock = False, threading.Lock()
        self._deaths: list[RankDied] = []
        self._report: Callable[[RankDied], None] = self._deaths.append
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._not_started: list[OSError] = []
        self._threads: list[threading.Thread] = []
        self.on_signal: Callable[[int], bool] = lambda signum: False
        """Function called, on another thread, when SIGTERM or SIGINT has ended a rank.

        Returns whether the signal ends the job; in that case it is no failure."""
        self.may_exit: Callable[[], bool] = lambda: True
        """Function that returns whether a rank may end with exit code 0. Otherwise that is reported too."""

    def start_ranks(self) -> None:
        """Start the processes. Raises: OSError if one cannot be started."""
        started = threading.Semaphore(0)
        self._threads = [
            threading.Thread(
                target=self._run, args=(rank, local_rank, started), name=f"rank_{rank}", daemon=True
            )
            for local_rank, rank in enumerate(self._ranks)
        ]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            started.acquire()
        if self._not_started:
            raise self._not_started[0]

    def report_deaths(self, report: Callable[[RankDied], None]) -> None:
        """Let this function be called, on another thread, with every rank that dies before `end`.

        Ranks that have already died are reported now."""
        with self._lock:
            self._report = report
            for death in self._deaths:
                report(death)

    def are_running(self) -> bool:
        """Return whether at least one rank has not ended."""
        return any(thread.is_alive() for thread in self._threads)

    def expect_end(self) -> None:
        """Declare that ranks may end from now on: their end is no longer reported as a failure."""
        self._ending = True

    def end(self, wait_s: float) -> None:
        """Wait `wait_s` seconds for the ranks to exit, then kill those that remain. Returns when all ranks
        and their children are gone."""
        self.expect_end()
        self._join(wait_s)
        self._end_ranks()
        self._join(_KILL_S)
        deadline = time.monotonic() + _CHILDREN_S  # engines and trackers notice that their rank is gone
        while any(map(group_runs, list(self._processes))) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """Kill the ranks and their child processes, without waiting."""
        self.expect_end()
        for process in list(self._processes.values()):
            _kill_group(process)
        self._tidy_up()

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            with contextlib.suppress(RuntimeError):  # a signal came before its start was complete
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, rank: int, local_rank: int, started: threading.Semaphore) -> None:
        try:
            if self._ending:
                return
            process = subprocess.Popen(
                self._command,
                env=self._env | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._processes[process.pid] = process
            if self._ending:  # set meanwhile: `kill` may not have seen this process
                _kill_group(process)
        except OSError as error:  # thread boundary: for example, the process limit of the machine is reached
            self._not_started.append(error)
            return
        finally:
            started.release()
        code = process.wait()
        signum = -code if code < 0 else code - 128
        if signum in (signal.SIGINT, signal.SIGTERM) and not self._ending and self.on_signal(signum):
            self.expect_end()
            self._end_ranks()
        elif not self._ending and (code != 0 or not self.may_exit()):
            with self._lock:
                self._report(RankDied(code, self._describe_rank(rank)))
            if code:  # with 0 it may have left in order, which whoever gets the report knows
                self._end_ranks()  # the other ranks would wait for this rank

    def _end_ranks(self) -> None:
        """Kill the running ranks at once, and send SIGTERM to their child processes, which may clean up."""
        for process in list(self._processes.values()):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                    process.kill()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def group_runs(group: int) -> bool:
    """Return whether a process of this process group runs.

    One that has ended stays in its group until its parent asks for its exit code. Ray's worker, which inherits what
    ranks leave behind, never asks."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, its_group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False
