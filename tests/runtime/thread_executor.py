"""An executor whose ranks are threads of this process. megarl does not know it: it is written against the
protocol in megarl/runtime/executor.py, and shows what another one takes."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from megarl.runtime.abort import Aborted, AbortToken
from megarl.runtime.executor import (
    Capabilities,
    Health,
    RemoteError,
    RoleHandle,
    at_label,
    check_role,
    check_some,
    check_subset,
)
from megarl.runtime.hosting import BuildRoles, HostedRoles, WorkerContext, stack_of_call, step_until
from megarl.runtime.messages import (
    Call,
    Event,
    Failure,
    Reply,
    Shutdown,
    decode_result,
    encode,
    encode_arguments,
)

_TICK_S = 0.1


class _Future:
    def __init__(self, executor: ThreadExecutor, role: str, method: str, ranks: Sequence[int]):
        self.role, self.method, self.ranks = role, method, tuple(ranks)
        self.values: dict[int, object] = {}
        self.seconds = self.ended = 0.0
        self._executor = executor

    def is_complete(self) -> bool:
        return len(self.values) == len(self.ranks)

    def result(self) -> list:
        self._executor.wait_any([self])
        return [self.values[rank] for rank in self.ranks]

    def first(self) -> object:
        return self.result()[0]

    def done(self) -> bool:
        self._executor._raise_failure()
        return self.is_complete()


class _Rank(threading.Thread):
    """The worker loop of one rank."""

    def __init__(self, rank: int, report: Callable[[Reply | Event], None]):
        super().__init__(name=f"rank_{rank}", daemon=True)
        self.rank, self.report = rank, report
        self.commands: queue.SimpleQueue[tuple[int, Call | Shutdown]] = queue.SimpleQueue()
        self.token = AbortToken()
        self.context = WorkerContext(rank, report, self.token)
        self.num_kept = 0
        """Commands before this one are aborted if they raise."""

    def run(self) -> None:
        try:
            hosted = HostedRoles(self.build(self.context), self.rank)
        except Exception as error:  # thread boundary
            self.report(Reply(-1, self.rank, failure=Failure.of(error, "worker", "start-up", None)))
            return
        while True:
            step_until(self.context.idle_hook, lambda: not self.commands.empty())
            index, command = self.commands.get()
            if isinstance(command, Shutdown):
                return
            if self.rank in command.ranks:
                self.report(self._run_call(hosted, index, command))

    def _run_call(self, hosted: HostedRoles, index: int, call: Call) -> Reply:
        try:
            return hosted.run(call, index)
        except Exception as error:  # thread boundary
            if index < self.num_kept and isinstance(error, Aborted):
                return Reply(index, self.rank, encode(None), 0.0, time.time())
            return Reply(index, self.rank, failure=Failure.of(error, call.role, call.method, call.label))

    build: BuildRoles


class ThreadExecutor:
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
        self.ranks = {role: list(of_role) for role, of_role in ranks.items()}
        self.label: str | None = None
        self.check_interrupt: Callable[[], None] = lambda: None
        self.failure: RuntimeError | None = None
        self.call_timeout_s: float | None = None
        self._interfaces = dict(interfaces or {})
        self._changed = threading.Condition()
        self._futures: list[_Future] = []
        self._events: deque[Event] = deque()
        self._seconds: dict[tuple[str, str], float] = {}
        self._threads = [_Rank(rank, self._take_report) for rank in range(world_size)]
        for thread in self._threads:
            thread.build = build_roles
            thread.start()

    @property
    def num_calls(self) -> int:
        return len(self._futures)

    def call(self, role: str, method: str, /, *args: object, **kwargs: object) -> _Future:
        check_role(self.ranks, role)
        return self.call_on(self.ranks[role], role, method, *args, **kwargs)

    def call_on(
        self, ranks: Sequence[int], role: str, method: str, /, *args: object, **kwargs: object
    ) -> _Future:
        check_subset(self.ranks, role, ranks)
        call = Call(role, tuple(ranks), method, self.label, encode_arguments(role, method, args, kwargs))
        with self._changed:
            self._raise_failure()
            self.check_interrupt()
            self._futures.append(_Future(self, role, method, ranks))
            for thread in self._threads:  # ranks that are not called skip it, as idle hooks agree per command
                thread.commands.put((len(self._futures) - 1, call))
            return self._futures[-1]

    def role(self, name: str) -> RoleHandle:
        check_role(self.ranks, name)
        return RoleHandle(self, name)

    def wait_any(self, futures: Sequence[_Future], or_event: bool = False) -> list[_Future]:
        check_some(futures)
        self._wait_until(lambda: (or_event and self._events) or any(f.is_complete() for f in futures))
        return [future for future in futures if future.is_complete()]

    def wait_event(self, timeout_s: float | None = None) -> Event | None:
        self._wait_until(lambda: bool(self._events), timeout_s)
        return self._events.popleft() if self._events else None

    def take_events(self) -> list[Event]:
        with self._changed:
            taken = list(self._events)
            self._events.clear()
        return taken

    def take_seconds(self) -> dict[tuple[str, str], float]:
        with self._changed:
            taken, self._seconds = self._seconds, {}
        return taken

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def drain(self) -> None:
        self._wait_until(lambda: all(future.is_complete() for future in self._futures))

    def abort_calls(self) -> None:
        for thread in self._threads:
            thread.num_kept, thread.token.is_requested = len(self._futures), True
        self.drain()

    def health(self, wait_s: float = 0.0) -> Health:
        return Health({t.rank: stack_of_call(t) for t in self._threads if t.is_alive()})

    def dead_ranks(self) -> list[int]:
        return [thread.rank for thread in self._threads if not thread.is_alive()]

    def where(self) -> str:
        return at_label(self.label).strip() or "before the first step"

    def fail(self, error: RuntimeError) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def kill(self, exit_code: int) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        for thread in self._threads:
            thread.context.idle_hook = None
            thread.commands.put((len(self._futures), Shutdown()))
        if self.failure is None:
            for thread in self._threads:
                thread.join(10.0)

    def _wait_until(self, is_ready: Callable[[], object], timeout_s: float | None = None) -> None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while self.failure is None and not is_ready():
                self.check_interrupt()
                if end is not None and time.monotonic() >= end:
                    return
                self._changed.wait(_TICK_S if end is None else max(0.0, min(_TICK_S, end - time.monotonic())))
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _take_report(self, report: Reply | Event) -> None:
        """Of a rank's thread."""
        with self._changed:
            if isinstance(report, Event):
                self._events.append(report)
            elif report.failure is not None:
                f = report.failure
                self.fail(RemoteError(f.role, report.rank, f.method, f.label, f.error, f.traceback))
            else:
                self._take_value(report)
            self._changed.notify_all()

    def _take_value(self, reply: Reply) -> None:
        future = self._futures[reply.index]
        try:
            value = decode_result(self._interfaces.get(future.role), future.method, reply.value)
        except TypeError as error:
            return self.fail(RemoteError(future.role, reply.rank, future.method, None, str(error), ""))
        future.values[reply.rank] = value
        future.seconds, future.ended = max(future.seconds, reply.seconds), max(future.ended, reply.ended)
        if future.is_complete():
            called = future.role, future.method
            self._seconds[called] = self._seconds.get(called, 0.0) + future.seconds


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
