"""Start the rank processes of a job on this machine, and end them, without torchrun.

`megarl train` and loops of a user run this way, unless Ray starts the ranks (ray_ranks.py).

    this process     holds the store, runs the loop; no torchrun, no driver beside rank 0
      |-- rank 0     python -m megarl.train @job.args, in a separate session: Ctrl-C reaches only this
      |              process, which ends the ranks
      `-- rank 1 ...

For the ranks this process takes the place of torchrun's agent. They find the store and their place in the
same variables. The ranks end with this process, however it ends (`end_with_parent`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from megarl.runtime.job_store import LOOPBACK, job_environment, job_store
from megarl.runtime.process import DRIVER_PID, rank_command, store_prefix, without_rank
from megarl.runtime.rank_processes import JobRanks, RankProcesses, undisturbed

if TYPE_CHECKING:
    from megarl.runtime.store_executor import StoreExecutor

_EXIT_S, _DEATH_FIRST_S = 30.0, 0.5


@contextlib.contextmanager
def started(
    processes: JobRanks,
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


class LocalRanks(RankProcesses):
    """Starts and ends the ranks of a job on this machine, one process `python -m module argv` each, and their
    c10d store.

    Args:
        describe_rank, tidy_up: as in RankProcesses.
        attempt: number of earlier starts of the job."""

    def __init__(
        self,
        argv: list[str],
        world_size: int,
        module: str = "megarl.train",
        describe_rank: Callable[[int], str] = str,
        tidy_up: Callable[[], object] = lambda: None,
        attempt: int = 0,
    ) -> None:
        self._world_size, self._store = world_size, job_store()
        env = without_rank(os.environ) | job_environment(self._store, world_size, world_size, attempt)
        env |= {DRIVER_PID: str(os.getpid())}
        super().__init__(rank_command(module, argv), env, range(world_size), describe_rank, tidy_up)

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
        from megarl.runtime.mailbox import connect
        from megarl.runtime.store_executor import StoreExecutor

        self.start_ranks()
        store = connect(f"{LOOPBACK}:{self._store.port}", store_prefix(self._env))
        executor = StoreExecutor(ranks, self._world_size, call_timeout_s, store, interfaces)
        self.may_exit = lambda: executor.is_ending
        self.report_deaths(lambda death: executor.fail(death.at(executor.where())))
        return executor
