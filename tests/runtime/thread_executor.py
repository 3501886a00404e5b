"""An executor whose ranks are threads of this process. megarl does not know it: it is written against the
base class in megarl/runtime/executor.py, and shows what another one takes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from megarl.runtime.abort import Aborted, AbortToken
from megarl.runtime.executor import CallFuture, Capabilities, Executor, Health, RemoteError
from megarl.runtime.hosting import BuildRoles, HostedRoles, WorkerContext, stack_of_call, step_until
from megarl.runtime.messages import Call, Event, Failure, Reply, Shutdown, encode


class _Rank(threading.Thread):
    """The worker loop of one rank."""

    def __init__(self, rank: int, report: Callable[[Reply | Event], None]):
        super().__init__(name=f"rank_{rank}", daemon=True)
        self.rank, self.report = rank, report
        self.commands: queue.SimpleQueue[tuple[int, Call | Shutdown]] = queue.SimpleQueue()
        self.token = AbortToken()
        self.context = WorkerContext(rank, report, self.token)
        self.label: str | None = None  # of the last call
        self.num_kept = 0
        """Commands before this one are aborted if they raise."""

    def run(self) -> None:
        try:
            hosted = HostedRoles(self.build(self.context), self.rank)
        except Exception as error:  # thread boundary
            self.report(Reply(-1, self.rank, failure=Failure.of(error, "worker", "start-up", None)))
            return
        while True:
            hook = self.context.idle_hook  # shutdown sets it to None from another thread
            try:
                step_until(hook, lambda: not self.commands.empty())
            except Exception as error:  # thread boundary
                assert hook is not None
                self.context.idle_hook = None
                failure = Failure.of(error, hook.role, hook.method, self.label)
                self.report(Reply(-1, self.rank, failure=failure))
            index, command = self.commands.get()
            if isinstance(command, Shutdown):
                return
            if self.rank in command.ranks:
                self.label = command.label
                self.report(self._run_call(hosted, index, command))

    def _run_call(self, hosted: HostedRoles, index: int, call: Call) -> Reply:
        try:
            return hosted.run(call, index)
        except Exception as error:  # thread boundary
            if index < self.num_kept and isinstance(error, Aborted):
                return Reply(index, self.rank, encode(None), 0.0, time.time())
            return Reply(index, self.rank, failure=Failure.of(error, call.role, call.method, call.label))

    build: BuildRoles


class ThreadExecutor(Executor):
    """Runs the roles that `build_roles` builds for each of `world_size` ranks, one thread per rank."""

    capabilities = Capabilities(
        overlap=True, deadlines=False, rank_processes=False, survives_worker_death=False
    )

    def __init__(
        self,
        build_roles: BuildRoles,
        ranks: Mapping[str, Sequence[int]],
        world_size: int,
        interfaces: Mapping[str, type] | None = None,
    ):
        super().__init__(ranks, interfaces)
        self._futures: list[CallFuture] = []
        self._threads = [_Rank(rank, self._take_report) for rank in range(world_size)]
        for thread in self._threads:
            thread.build = build_roles
            thread.start()

    def _issue(self, call: Call) -> CallFuture:
        with self._changed:
            self._raise_failure()
            self.check_interrupt()
            self.num_calls += 1
            self._futures.append(CallFuture(self, call.role, call.method, call.ranks))
            for thread in self._threads:  # ranks that are not called skip it, as idle hooks agree per command
                thread.commands.put((len(self._futures) - 1, call))
            return self._futures[-1]

    def drain(self) -> None:
        self._wait_until(lambda: not any(future.missing() for future in self._futures))

    def abort_calls(self) -> None:
        for thread in self._threads:
            thread.num_kept, thread.token.is_requested = len(self._futures), True
        self.drain()

    def health(self, wait_s: float = 0.0) -> Health:
        return Health({t.rank: stack_of_call(t) for t in self._threads if t.is_alive()})

    def dead_ranks(self) -> list[int]:
        return [thread.rank for thread in self._threads if not thread.is_alive()]

    def kill(self, exit_code: int) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        for thread in self._threads:
            thread.context.idle_hook = None
            thread.commands.put((len(self._futures), Shutdown()))
        if self.failure is None:
            for thread in self._threads:
                thread.join(10.0)

    def _take_report(self, report: Reply | Event) -> None:
        """Of a rank's thread."""
        if isinstance(report, Event):
            self._keep_event(report)
        elif report.failure is not None:
            self.fail(RemoteError(report.rank, report.failure))
        else:
            future = self._futures[report.index]
            try:
                self._keep_value(future, report)
            except TypeError as error:
                self.fail(RemoteError(report.rank, Failure(future.role, future.method, None, str(error), "")))


class Agreement:
    """Gives the threads of all ranks the first one's value, call by call."""

    def __init__(self, size: int):
        self.size, self.barrier, self.value = size, threading.Barrier(size), False

    def of_rank(self, rank: int) -> Callable[[bool], bool]:
        def agree(value: bool) -> bool:
            if rank == 0:
                self.value = value
            self.barrier.wait(30.0)
            agreed = self.value
            self.barrier.wait(30.0)
            return agreed

        return agree
