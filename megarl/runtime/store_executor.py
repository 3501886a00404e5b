"""Run calls over the job's c10d store: send commands, read reports, enforce deadlines."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from megarl.runtime.executor import (
    CallTimeout,
    Capabilities,
    Health,
    RemoteError,
    RoleHandle,
    at_label,
    check_role,
    check_some,
    check_subset,
)
from megarl.runtime.mailbox import Mailbox, connect
from megarl.runtime.messages import (
    Call,
    Command,
    Event,
    Failure,
    Reply,
    Shutdown,
    Terminated,
    decode_result,
    encode_arguments,
)
from megarl.runtime.process import has_died, process_name, world_size_from_env
from megarl.runtime.shutdown_listener import ABORT_CALLS, ALL_RANKS_KNOW, DRIVER, PING, PROCESS
from megarl.runtime.signing import JOB_SECRET, job_secret

_TICK_S = 1.0  # seconds between two looks at the clock
_SIGNAL_S = 1.0  # seconds for a simultaneous signal to be handled
_STACKS_S = 3.0  # seconds for ranks to report their stacks
_SOON_S, _PING_S = 0.5, 5.0  # seconds for ranks to answer a ping
_LOCK_S = 1.0


class _Future:
    """A call in flight. The executor's reader thread fills in its values."""

    def __init__(
        self,
        executor: StoreExecutor,
        index: int,
        role: str,
        method: str,
        ranks: Sequence[int],
    ):
        self.index, self.role, self.method, self.ranks = index, role, method, tuple(ranks)
        self.label, self.issued = executor.label, executor._now()
        self.values: dict[int, object] = {}
        self.seconds = self.ended = 0.0
        self._executor = executor

    def missing(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.values]

    def result(self) -> list:
        self._executor.wait_any([self])
        return [self.values[rank] for rank in self.ranks]

    def first(self) -> object:
        return self.result()[0]

    def done(self) -> bool:
        return self._executor._is_done(self)


class StoreExecutor:
    """An executor over the job's store.

    A reader thread takes reports from the inbox as they come. An error of any rank is therefore known at
    once, even while the driver waits or works.

    Args:
        ranks: role -> its ranks. Every rank of the world needs a role.
        world_size: number of ranks of the job.
        call_timeout_s: seconds that a rank may take for one call, from when the rank is free to start it.
        writer, reader: two connections to the store; see `mailbox.connect`.
        interfaces: role -> class whose annotated methods give the result types of the role's methods. Without
            a class, results are of plain types.
    """

    capabilities = Capabilities(
        overlap=True, deadlines=True, rank_processes=True, survives_worker_death=False
    )

    def __init__(
        self,
        ranks: Mapping[str, Sequence[int]],
        world_size: int,
        call_timeout_s: float,
        writer: dist.Store,
        reader: dist.Store,
        interfaces: Mapping[str, type] | None = None,
    ):
        _check_ranks(ranks, world_size)
        self.ranks = {role: list(of_role) for role, of_role in ranks.items()}
        self.label: str | None = None
        self.check_interrupt: Callable[[], None] = lambda: None
        self.failure: RuntimeError | None = None
        self.call_timeout_s = call_timeout_s
        self.death_first_s = 0.0
        self.is_shutting_down: Callable[[], bool] = lambda: False
        self.on_terminated: Callable[[], None] = lambda: None
        self._interfaces = dict(interfaces or {})
        self._stopped_s = 0.0
        self._outbox, self._inbox = Mailbox(writer), Mailbox(reader)
        self._outbox.set(DRIVER, process_name())
        self._changed = threading.Condition()
        self._futures: dict[int, _Future] = {}  # calls in flight, by index
        self._queues: dict[int, deque[int]] = {
            rank: deque() for rank in range(world_size)
        }  # indices of calls in flight on each rank, oldest first
        self._free_since = dict.fromkeys(range(world_size), 0.0)
        self._events: deque[Event] = deque()
        self._has_ended = False
        self._next, self._num_questions = 0, 0
        self._log: deque[tuple[int, list[str]]] = deque()  # (index, keys) of the commands still in the store
        self._answered = dict.fromkeys(
            range(world_size), -1
        )  # newest index that each rank answered and therefore has read
        self._seconds: dict[tuple[str, str], float] = {}
        self._reader = threading.Thread(target=self._read, name="read_inbox", daemon=True)
        self._reader.start()

    @classmethod
    def from_env(
        cls, ranks: dict[str, list[int]], call_timeout_s: float, interfaces: Mapping[str, type] | None = None
    ) -> StoreExecutor:
        """Connect to the job that `start_driver` described. Call this in the driver process."""
        job_secret()
        os.environ.pop(JOB_SECRET, None)  # the driver's children do not need the secret
        writer, reader = (
            connect(os.environ["MEGARL_STORE"], os.environ["MEGARL_STORE_PREFIX"]) for _ in range(2)
        )
        return cls(ranks, world_size_from_env(), call_timeout_s, writer, reader, interfaces)

    def call(self, role: str, method: str, /, *args: object, **kwargs: object) -> _Future:
        check_role(self.ranks, role)
        return self.call_on(self.ranks[role], role, method, *args, **kwargs)

    def call_on(
        self, ranks: Sequence[int], role: str, method: str, /, *args: object, **kwargs: object
    ) -> _Future:
        check_subset(self.ranks, role, ranks)
        arguments = encode_arguments(role, method, args, kwargs)
        call = Call(role, tuple(ranks), method, self.label, arguments)
        return self._issue(call, role, method, ranks)

    def wait_any(self, futures: Sequence[_Future], or_event: bool = False) -> list[_Future]:
        check_some(futures)
        self._wait_until(
            lambda: (or_event and self._events) or any(f.index not in self._futures for f in futures)
        )
        return [future for future in futures if future.index not in self._futures]

    def wait_event(self, timeout_s: float | None = None) -> Event | None:
        self._wait_until(lambda: bool(self._events), timeout_s)
        return self._events.popleft() if self._events else None

    def take_events(self) -> list[Event]:
        with self._changed:
            taken = list(self._events)
            self._events.clear()
        return taken

    def role(self, name: str) -> RoleHandle:
        check_role(self.ranks, name)
        return RoleHandle(self, name)

    def take_seconds(self) -> dict[tuple[str, str], float]:
        with self._changed:
            taken, self._seconds = self._seconds, {}
        return taken

    def drain(self) -> None:
        self._wait_until(lambda: not self._futures)

    def abort_calls(self) -> None:
        self._outbox.set(PING, "asked")  # ranks read this key first
        if not self._outbox.ask_all(ABORT_CALLS, list(self._queues), _PING_S, str(self._next)):
            self._outbox.set(ALL_RANKS_KNOW, "asked")
        self.drain()

    def health(self, wait_s: float = _STACKS_S) -> Health:
        with self._changed:
            number, self._num_questions = self._num_questions, self._num_questions + 1
        return self._ask_health(number, wait_s)

    def shutdown(self) -> None:
        if not self._has_ended:
            # Threads of the ranks that wait for a question are in the store's code, see `_end`.
            self._outbox.end_health(self._num_questions)
            for key in (PING, ABORT_CALLS, ALL_RANKS_KNOW):
                self._outbox.set(key, "end")
            self._issue(Shutdown(), "driver", "shutdown", list(self._queues)).result()
            self._end()

    def kill(self, exit_code: int) -> None:
        self._outbox.kill(self._next, exit_code)
        self._end()

    @property
    def num_calls(self) -> int:
        return self._next

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def dead_ranks(self) -> list[int]:
        missing = self._outbox.ask_all(PING, list(self._queues), _SOON_S)
        dead = [rank for rank, name in self._outbox.of_ranks(PROCESS, missing).items() if has_died(name)]
        return dead or self._outbox.ask_all(PING, missing, _PING_S)

    def where(self) -> str:
        when = at_label(self.label).strip() or "before the first step"
        if not self._changed.acquire(
            timeout=_LOCK_S
        ):  # a hanging thread may hold the lock, and the caller may be about to end it
            return f"{when}, in the job's store"
        try:
            calls = [
                f"{f.role}.{f.method} on rank {', '.join(map(str, f.missing()))}"
                for f in self._futures.values()
            ]
        finally:
            self._changed.release()
        return f"{when}, waiting for {' and '.join(calls)}" if calls else f"{when}, no call in flight"

    def _end(self) -> None:
        """End the reader thread.

        The store's C++ code may terminate a process that exits while a thread is inside it."""
        self._has_ended = True
        self._outbox.close()
        self._reader.join(timeout=1.0)

    def _issue(self, command: Command, role: str, method: str, ranks: Sequence[int]) -> _Future:
        with self._changed:
            if self.failure is not None:
                raise self.failure
            self.check_interrupt()
            future = _Future(self, self._next, role, method, ranks)
            self._futures[future.index] = future
            for rank in ranks:
                self._queues[rank].append(future.index)
            self._next += 1
            self._log.append((future.index, self._outbox.post(future.index, command)))
        return future

    def _wait_until(self, is_ready: Callable[[], object], timeout_s: float | None = None) -> None:
        """Block until `is_ready` or the timeout. Raises: the failure; errors of `check_interrupt`."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while self.failure is None and not is_ready():
                self.check_interrupt()
                left = self._seconds_left()
                if end is not None:
                    left = min(left, end - time.monotonic())
                if end is not None and left <= 0.0 and self.failure is None:
                    return
                self._wait_for_change(left)
            if self.failure is not None:
                raise self.failure

    def _ask_health(self, number: int, wait_s: float) -> Health:
        ranks = list(self._queues)
        stacks = self._outbox.ask_health(number, ranks, wait_s)
        return Health(stacks, [rank for rank in ranks if rank not in stacks])

    def _is_done(self, future: _Future) -> bool:
        with self._changed:
            if self.failure is not None:
                raise self.failure
            return future.index not in self._futures

    def _now(self) -> float:
        """Return seconds on a clock that stands while this process is stopped (Ctrl-Z).

        Replies of ranks during that time are not late."""
        return time.monotonic() - self._stopped_s

    def _wait_for_change(self, seconds: float) -> None:
        start, tick = time.monotonic(), min(seconds, _TICK_S)
        self._changed.wait(tick)
        if (lost := time.monotonic() - start - tick) > _TICK_S:
            self._stopped_s += lost

    def _seconds_left(self) -> float:
        """Return the seconds until the next deadline. Sets the failure after a missed deadline.

        A rank's clock starts when its oldest call could start there."""
        now = self._now()
        waited = {
            rank: now - max(self._futures[queue[0]].issued, self._free_since[rank])
            for rank, queue in self._queues.items()
            if queue
        }
        if not waited:
            return _TICK_S
        slowest = max(waited, key=waited.__getitem__)
        if waited[slowest] >= self.call_timeout_s:
            late = self._futures[self._queues[slowest][0]]
            number, self._num_questions = self._num_questions, self._num_questions + 1
            self.failure = CallTimeout(
                late.role,
                late.method,
                late.label,
                late.missing(),
                sorted(late.values),
                self.call_timeout_s,
                self._ask_health(number, _STACKS_S).stacks,
            )
            return 0.0
        return self.call_timeout_s - waited[slowest]

    # Methods of the reader thread.

    def _read(self) -> None:
        try:
            while (report := self._inbox.receive()) is not None:
                match report:
                    case Terminated():
                        self.on_terminated()
                    case Event():
                        self._keep_event(report)
                    case Reply(failure=Failure() as failure):
                        self._take_failure(report.rank, failure)
                    case Reply() if self.failure is None:
                        self._accept(report)
                        self._inbox.delete(self._read_by_all())
        except Exception as error:  # thread boundary: the main thread would wait for ever
            time.sleep(
                _SIGNAL_S
            )  # Ctrl-C may end the store's process first; the signal then gives the better message
            text = (
                f"[driver] cannot hear the workers any more {self.where()}: {type(error).__name__}: {error}"
            )
            self.fail(RuntimeError(text.splitlines()[0]))

    def _keep_event(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def _take_failure(self, rank: int, failure: Failure) -> None:
        time.sleep(self.death_first_s)
        if not self.is_shutting_down():
            f = failure
            self.fail(RemoteError(f.role, rank, f.method, f.label, f.error, f.traceback))

    def _accept(self, reply: Reply) -> None:
        """Store one value, and notify the main thread if the call is complete."""
        with self._changed:
            future = self._futures[reply.index]
            try:
                interface = self._interfaces.get(future.role)
                future.values[reply.rank] = decode_result(interface, future.method, reply.value)
            except Exception as error:  # including errors of an interface's own types
                return self.fail(
                    RemoteError(future.role, reply.rank, future.method, future.label, str(error), "")
                )
            self._queues[reply.rank].popleft()
            self._free_since[reply.rank] = self._now()
            self._answered[reply.rank] = reply.index
            future.seconds = max(future.seconds, reply.seconds)
            future.ended = max(future.ended, reply.ended)
            if not future.missing():
                del self._futures[reply.index]
                called = future.role, future.method
                self._seconds[called] = self._seconds.get(called, 0.0) + future.seconds
                self._changed.notify_all()

    def fail(self, error: RuntimeError) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def _read_by_all(self) -> list[str]:
        """Return the keys of the commands that every rank has read."""
        keys: list[str] = []
        with self._changed:
            oldest = min(self._answered.values())
            while self._log and self._log[0][0] <= oldest:
                keys += self._log.popleft()[1]
        return keys


def _check_ranks(ranks: Mapping[str, Sequence[int]], world_size: int) -> None:
    placed = {rank for of_role in ranks.values() for rank in of_role}
    if outside := sorted(placed - set(range(world_size))):
        raise ValueError(
            f"roles are placed on ranks {outside}, but the job has {world_size} ranks (0 to "
            f"{world_size - 1}). Start more."
        )
    if idle := sorted(set(range(world_size)) - placed):
        raise ValueError(
            f"no role is placed on ranks {idle} of the {world_size} that were started. Start fewer, "
            "or place a role there."
        )
