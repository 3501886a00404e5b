"""Start the rank processes of a job on this machine, and end them, without torchrun.

`megarl train` and loops of a user run this way.

    this process     holds the store, runs the loop; no torchrun, no driver beside rank 0
      |-- rank 0     python -m megarl.train @job.args, in a separate session: Ctrl-C reaches only this
      |              process, which ends the ranks
      `-- rank 1 ...

For the ranks this process takes the place of torchrun's agent. They find the store and their place in the
same variables. The ranks end with this process, however it ends (`end_with_parent`)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from megarl.runtime.job_store import LOOPBACK, loopback_store, store_environment
from megarl.runtime.process import DRIVER_PID, store_prefix, without_rank

if TYPE_CHECKING:
    import torch.distributed as dist

    from megarl.runtime.store_executor import StoreExecutor

_EXIT_S, _KILL_S, _CHILDREN_S, _DEATH_FIRST_S = 30.0, 10.0, 2.0, 0.5


@contextlib.contextmanager
def local_ranks(
    processes: LocalRanks,
    ranks: dict[str, list[int]],
    call_timeout_s: float,
    interfaces: Mapping[str, type] | None = None,
) -> Iterator[StoreExecutor]:
    """Start the ranks of a job, and give the `with` block the executor that reaches them. All ranks are gone
    when the block ends.

    The ranks are shut down at the end and killed after an exception. In both cases all ranks are gone when
    the context ends. A rank that dies sets the executor's failure, like a rank that raises. Then the other
    ranks are ended at once.

    Args:
        ranks, call_timeout_s, interfaces: as in StoreExecutor."""
    executor = None
    try:
        executor = processes.start(ranks, call_timeout_s, interfaces)
        executor.death_first_s = _DEATH_FIRST_S
        yield executor
        executor.shutdown()
        processes.end(_EXIT_S)
    except BaseException as error:
        with undisturbed(is_interrupt=isinstance(error, KeyboardInterrupt)):
            # before the ranks are told: an interrupt may have left the executor locked, which would block
            # reports of deaths
            processes.expect_end()
            if executor is not None:
                executor.kill(1)
            processes.end(0.0)
        raise


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

    def __init__(self, code: int, description: str):
        """Write the message about the death of a rank from its exit code.

        Args:
            code: exit code as in Popen.
            description: describes the rank, for example "1: actor, critic"."""
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


class LocalRanks:
    """Starts and ends the ranks of a job on this machine, one process `python -m module argv` each, and their
    c10d store.

    A thread per rank starts its process and waits for it. The kernel ends a child with the thread that
    started it, and a caller's thread may be short-lived.

    Args:
        describe_rank: describes a rank that has died, for example "1: actor, critic".
        tidy_up: removes resources that killed ranks could not remove themselves.
        attempt: number of earlier starts of the job."""

    def __init__(
        self,
        argv: list[str],
        world_size: int,
        module: str = "megarl.train",
        describe_rank: Callable[[int], str] = str,
        tidy_up: Callable[[], object] = lambda: None,
        attempt: int = 0,
    ):
        self._store = loopback_store()
        self._env = (
            without_rank(os.environ)
            | store_environment(self._store)
            | {
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "TORCHELASTIC_RUN_ID": str(uuid.uuid4()),
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "PYTHONSAFEPATH": "1",
                DRIVER_PID: str(os.getpid()),
            }
        )
        self._env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        self._command = [sys.executable, "-u", "-P", "-m", module, *argv]
        self._world_size, self._describe_rank, self._tidy_up = world_size, describe_rank, tidy_up
        self._ending, self._lock = False, threading.Lock()
        self._deaths: list[RankDied] = []
        self._report: Callable[[RankDied], None] = self._deaths.append
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._not_started: list[OSError] = []
        self._threads: list[threading.Thread] = []
        self.on_signal: Callable[[int], bool] = lambda signum: False
        """Function called, on another thread, when SIGTERM or SIGINT has ended a rank.

        Returns whether the signal ends the job; in that case it is no failure."""

    def start(
        self,
        ranks: dict[str, list[int]],
        call_timeout_s: float,
        interfaces: Mapping[str, type] | None = None,
    ) -> StoreExecutor:
        """Start the processes, and return the executor that reaches them.

        A rank that dies sets this executor's failure.

        Args:
            ranks: role -> its ranks."""
        from megarl.runtime.store_executor import StoreExecutor

        self.start_ranks()
        executor = StoreExecutor(
            ranks, self._world_size, call_timeout_s, self._connect(), self._connect(), interfaces
        )
        self.report_deaths(lambda death: executor.fail(death.at(executor.where())))
        return executor

    def start_ranks(self) -> None:
        """Start the processes. Raises: OSError if one cannot be started."""
        started = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._run, args=(rank, started), name=f"rank_{rank}", daemon=True)
            for rank in range(self._world_size)
        ]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            started.acquire()
        if self._not_started:
            raise self._not_started[0]

    def _connect(self) -> dist.Store:
        from megarl.runtime.mailbox import connect

        return connect(f"{LOOPBACK}:{self._store.port}", store_prefix(self._env))

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
        while any(map(_is_group, list(self._processes))) and time.monotonic() < deadline:
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

    def _run(self, rank: int, started: threading.Semaphore) -> None:
        try:
            if self._ending:
                return
            process = subprocess.Popen(
                self._command,
                env=self._env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
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
        elif code != 0 and not self._ending:
            with self._lock:
                self._report(RankDied(code, self._describe_rank(rank)))
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


def _is_group(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True
