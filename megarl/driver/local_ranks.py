"""Ranks that this process starts and ends itself, for a loop of one's own: the process that runs it is the driver.

    this process     holds the store, runs the loop; no torchrun, no driver beside rank 0
      |-- rank 0     python -m megarl.train @job.args, in a session of its own: Ctrl-C reaches this process alone, which ends them
      `-- rank 1 ...

To the ranks this process is what torchrun's agent is to others: they find its store and their place in the same variables. They end
with it, however it ends (`end_with_parent`)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from megarl.driver.job_store import LOOPBACK, loopback_store, store_environment
from megarl.driver.launch import cause_of_death
from megarl.driver.torchrun import DRIVER_PID, without_rank
from megarl.workers.process import store_prefix

if TYPE_CHECKING:
    import torch.distributed as dist

    from megarl.driver.store_executor import StoreExecutor

_EXIT_S, _TERM_S, _KILL_S, _CHILDREN_S, _DEATH_FIRST_S = 30.0, 3.0, 10.0, 2.0, 0.5


@contextlib.contextmanager
def local_ranks(argv: list[str], ranks: dict[str, list[int]], world_size: int, call_timeout_s: float,
                module: str = "megarl.train") -> Iterator[StoreExecutor]:  # fmt: skip
    """Start the ranks of a job; the executor that reaches them. At the end they are shut down, after an exception killed; in both cases
    all of them are gone when this returns.

    A rank that dies without a word is the executor's failure, like one that raises: then the other ranks are ended at once.

    Args:
        argv, module: a rank is `python -m module argv`.
        ranks: role -> its ranks.
        call_timeout_s: as of StoreExecutor.
    """
    from megarl.driver.store_executor import StoreExecutor

    processes, executor = LocalRanks(argv, world_size, module, ranks), None
    try:
        executor = StoreExecutor(ranks, world_size, call_timeout_s, processes.connect(), processes.connect())
        executor.death_first_s = _DEATH_FIRST_S
        processes.tell_deaths(executor.fail)
        yield executor
        executor.shutdown()
        processes.end(_EXIT_S)
    except BaseException:
        processes.expect_end()  # before the ranks hear of it: an interrupt may have left the executor locked for those who would tell it
        if executor is not None:
            executor.abort(1)
        processes.end(0.0)
        raise


class LocalRanks:
    """Processes `python -m module argv`, one per rank, and the store that they meet at.

    Each has a thread here that starts it and waits for it: the kernel ends a child with the thread that started it, and a caller's thread
    may be short-lived. `ranks_of`: role -> its ranks, to say who was on a rank that died."""

    def __init__(self, argv: list[str], world_size: int, module: str, ranks_of: Mapping[str, Sequence[int]]):
        self._store = loopback_store()
        self._env = without_rank(os.environ) | store_environment(self._store) | {
            "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
            "TORCHELASTIC_RUN_ID": str(uuid.uuid4()), "TORCHELASTIC_RESTART_COUNT": "0",
            "GROUP_RANK": "0", "PYTHONSAFEPATH": "1", DRIVER_PID: str(os.getpid()),
        }  # fmt: skip
        self._env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        self._ranks_of = ranks_of
        self._ending, self._lock = False, threading.Lock()
        self._deaths: list[RuntimeError] = []
        self._tell: Callable[[RuntimeError], None] = self._deaths.append
        self._processes: dict[int, subprocess.Popen] = {}
        started = threading.Barrier(world_size + 1)
        command = [sys.executable, "-u", "-P", "-m", module, *argv]
        self._threads = {rank: threading.Thread(target=self._run, args=(rank, command, started), name=f"rank_{rank}", daemon=True)
                         for rank in range(world_size)}  # fmt: skip
        for thread in self._threads.values():
            thread.start()
        try:
            started.wait()
        except BaseException:
            self.end(0.0)
            raise

    def connect(self) -> dist.Store:
        """A connection to the store, for the driver's half of the mailbox."""
        from megarl.workers.mailbox import connect

        return connect(f"{LOOPBACK}:{self._store.port}", store_prefix(self._env))

    def tell_deaths(self, tell: Callable[[RuntimeError], None]) -> None:
        """Call this, on another thread, for every rank that dies before `end`, and now for those that have."""
        with self._lock:
            self._tell = tell
            for death in self._deaths:
                tell(death)

    def expect_end(self) -> None:
        """From now on a rank that ends is nothing to tell."""
        self._ending = True

    def end(self, wait_s: float) -> None:
        """Give the ranks so long to exit by themselves, then end them and whatever they have started. Returns when all are gone."""
        self.expect_end()
        for signum, seconds in ((None, wait_s), (signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
            deadline = time.monotonic() + seconds
            self._signal(signum)
            for thread in self._threads.values():
                thread.join(max(0.0, deadline - time.monotonic()))
        deadline = time.monotonic() + _CHILDREN_S  # engines and trackers notice that their rank is gone
        while any(map(_is_group, self._processes)) and time.monotonic() < deadline:
            time.sleep(0.05)
        from megarl.rollout.environment import sweep_shared_memory

        sweep_shared_memory()  # of engines that could not tidy up

    def _run(self, rank: int, command: list[str], started: threading.Barrier) -> None:
        try:
            process = subprocess.Popen(command, env=self._env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdin=subprocess.DEVNULL,
                                       start_new_session=True)  # fmt: skip
            self._processes[process.pid] = process
        finally:
            started.wait()
        code = process.wait()
        if code != 0 and not self._ending:
            with self._lock:
                cause = cause_of_death(rank, code, self._ranks_of) or f"[rank {rank}] ended with exit code {code}; stderr may say why."
                self._tell(RuntimeError(cause))
            self._signal(signal.SIGTERM)  # the others would wait for it

    def _signal(self, signum: signal.Signals | None) -> None:
        """To every rank that has not ended, and the processes that it started."""
        for process in self._processes.values():
            if signum is not None and process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signum)


def _is_group(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True
