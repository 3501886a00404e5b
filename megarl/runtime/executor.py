"""Define the interface by which a driver calls methods of roles on ranks, whatever starts the ranks.

Code above this module does not know which executor runs. No executor knows what a role or a step is.

    updated = actor.update(step)         a future, returned at once
    metrics = updated.result()           one value per rank of the role, in the order of its ranks

create
    A factory makes an executor over its ranks; `ranks` and `capabilities` describe the executor.
call
    call, call_on, role: calls on disjoint ranks overlap; calls on one rank run in the order issued.
wait
    Future.result, wait_any, wait_event: `check_interrupt` can end each of them.
events
    take_events, wait_event: reports that ranks send outside of results.
abort
    abort_calls: calls in flight end early where they can; their values are not used.
drain
    drain: wait for every call that was issued.
health
    health: which ranks answer, and the stack of each of them.
shut down
    shutdown: the ranks end after all issued calls.
kill
    kill: the ranks end at once.

Arguments, results and events are messages of declared types (messages.py). tests/runtime/executor_contract.py
tests all of this for any executor."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.futures import Future
from megarl.runtime.messages import Call, Event, Failure, Reply, decode_result, encode_arguments

_TICK_S = 1.0  # seconds between two calls of `check_interrupt`


@dataclass(frozen=True)
class Capabilities:
    """The abilities of an executor: overlap calls, enforce deadlines, run ranks as processes, survive the
    death of a rank."""

    overlap: bool
    """Whether calls on disjoint ranks run at the same time.

    Otherwise a call has ended when `call` returns."""
    deadlines: bool
    """Whether a call longer than `call_timeout_s` raises a CallTimeout that shows where the ranks are."""
    rank_processes: bool
    """Whether ranks are separate processes.

    The death of a rank process is then a failure, and no rank process is left after the shutdown."""
    survives_worker_death: bool
    """Whether the other ranks can be called after one has died."""


@dataclass(frozen=True)
class Health:
    """The ranks that have answered a question of the driver, with their stacks, and the ranks that are
    silent."""

    stacks: dict[int, str]
    """Stack of the main thread of each rank that has answered."""
    silent: list[int] = field(default_factory=list)
    """Ranks that have not answered: dead, stopped, or in native code that holds the GIL."""


class RemoteError(RuntimeError):
    """Raised in the driver if a method raised on a rank. The message has role, rank, method, label ("step
    3"), error and remote traceback."""

    def __init__(self, rank: int, failure: Failure) -> None:
        self.role, self.rank, self.method, self.label = failure.role, rank, failure.method, failure.label
        self.error, self.remote_traceback = failure.error, failure.traceback
        self.read_on = failure.read_on
        super().__init__(
            f"[{self.role} rank {rank}] {self.method} failed{at_label(self.label)}: {self.error}\n"
            f"{self.remote_traceback}"
        )


class CallTimeout(RuntimeError):
    """Raised in the driver if a call took longer than --call-timeout-s. The message shows where the ranks
    are.

    Args:
        ranks: ranks that did not answer.
        stacks: Python stack of each rank that has reported one; None if the ranks were not asked."""

    def __init__(
        self,
        role: str,
        method: str,
        label: str | None,
        ranks: list[int],
        answered: list[int],
        timeout_s: float,
        stacks: Mapping[int, str] | None = None,
    ):
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        silent = [] if stacks is None else [rank for rank in ranks if rank not in stacks]
        others = f" (answered: {', '.join(map(str, answered))})" if answered else ""
        super().__init__(
            f"[{role}] {method} timed out{at_label(label)}: no answer from {named}{others} within "
            f"call_timeout_s ({timeout_s:g} s). Raise --call-timeout-s if the call is merely slow."
            + "".join(
                f"\n[rank {rank}] does not say where it is: stopped, or in native code that keeps "
                "Python's lock."
                for rank in silent
            )
            + "".join(f"\n[rank {rank}] was here:\n{stack}" for rank, stack in sorted((stacks or {}).items()))
        )
        self.role, self.method, self.label, self.ranks = role, method, label, ranks


class CallFuture(Future[Any]):
    """Future of a call on some ranks, whose values arrive one by one."""

    def __init__(self, executor: Executor, role: str, method: str, ranks: Sequence[int]) -> None:
        self.role, self.method, self.ranks, self.label = role, method, tuple(ranks), executor.label
        self.values: dict[int, object] = {}
        """Value of each rank that has answered."""
        self._executor = executor

    def missing(self) -> list[int]:
        """Return the ranks that have not answered the call yet."""
        return [rank for rank in self.ranks if rank not in self.values]

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have answered."""
        return len(self.values) == len(self.ranks)

    def result(self) -> list[Any]:
        self._executor.wait_any([self])
        return [self.values[rank] for rank in self.ranks]

    def done(self) -> bool:
        return self._executor.has_ended(self)


class Executor(ABC):
    """Base class of executors, which call methods of roles on their ranks and return futures of the results.

    A subclass sends calls (`_issue`), passes every report of a rank to `_keep_value`, `_keep_event` or
    `fail`, and ends the ranks.

    Args:
        ranks: role -> its ranks.
        interfaces: role -> class whose annotated methods give the result types of the role's methods. Without
            a class, results are of plain types.
        call_timeout_s: seconds that a rank may take for one call, from when the rank is free to start it."""

    capabilities: Capabilities

    def __init__(
        self,
        ranks: Mapping[str, Sequence[int]],
        interfaces: Mapping[str, type] | None = None,
        call_timeout_s: float = math.inf,
    ) -> None:
        self.ranks = {role: list(of_role) for role, of_role in ranks.items()}
        self.call_timeout_s = call_timeout_s
        self.label: str | None = None
        """Label of the calls, set by the loop, for example "step 3". Errors name it."""
        self.check_interrupt: Callable[[], None] = lambda: None
        """Function set by the loop; an exception from it interrupts the loop.

        The executor calls it on the loop's thread before a call is issued and while the loop waits."""
        self.failure: RuntimeError | None = None
        """The first failure of any rank. From then on calls and waits raise it."""
        self.num_calls = 0
        """Number of issued calls."""
        self._interfaces = interfaces or {}
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)

    # Calls.

    def call(self, role: str, method: str, /, *args: object, **kwargs: object) -> CallFuture:
        """Call a method on all ranks of the role, and return a future of one value per rank. Raises:
        CannotSend, naming the argument that no message can hold."""
        return self.call_on(self._ranks_of(role), role, method, *args, **kwargs)

    def call_on(
        self, ranks: Sequence[int], role: str, method: str, /, *args: object, **kwargs: object
    ) -> CallFuture:
        """Call a method on these ranks of the role only, and return a future of their values, in the order of
        `ranks`."""
        of_role = self._ranks_of(role)
        if not ranks or len({*ranks}) < len(ranks) or not {*ranks} <= {*of_role}:
            raise ValueError(
                f"ranks ({list(ranks)}) must be some of those of role {role} ({of_role}), each once. "
                f"Try {of_role[:1]}."
            )
        arguments = encode_arguments(role, method, args, kwargs)
        return self._issue(Call(role, tuple(ranks), method, self.label, arguments))

    def _ranks_of(self, role: str) -> list[int]:
        if role not in self.ranks:
            raise ValueError(
                f"role ({role!r}) is not placed on any rank. Placed roles: {', '.join(sorted(self.ranks))}."
            )
        return self.ranks[role]

    @abstractmethod
    def _issue(self, call: Call) -> CallFuture:
        """Send a call to its ranks and return its future. Raises: the executor's failure; errors of
        `check_interrupt`."""

    def _keep_value(self, future: CallFuture, reply: Reply) -> None:
        """Store the value that one rank has returned for a call. Raises: TypeError for a value of another
        type than declared."""
        interface, is_aborted = self._interfaces.get(future.role), not reply.value
        value = None if is_aborted else decode_result(interface, future.method, reply.value)
        with self._changed:
            future.values[reply.rank] = value
            future.seconds = max(future.seconds, reply.seconds)
            future.ended = max(future.ended, reply.ended)
            if future.is_complete:
                self._seconds[future.role, future.method] += future.seconds
                self._changed.notify_all()

    def take_seconds(self) -> dict[tuple[str, str], float]:
        """Return (role, method) -> seconds of all calls that ended since the last `take_seconds`.

        Each call counts as in `Future.seconds`."""
        with self._changed:
            taken, self._seconds = self._seconds, defaultdict(float)
        return taken

    # Waiting.

    def wait_any(
        self, futures: Sequence[Future[Any]], or_event: bool | Collection[str] = False
    ) -> list[Future[Any]]:
        """Block until at least one future is done. Returns the futures that are done.

        Args:
            or_event: return also when an event, or one of these names, waits to be taken, possibly without a
                finished future.
        Raises: like `Future.result`; ValueError for no futures."""
        if not futures:
            raise ValueError("wait_any needs at least one future: it would wait for ever.")
        self._wait_until(lambda: self._has_event(or_event) or any(future.done() for future in futures))
        return [future for future in futures if future.done()]

    def _has_event(self, wanted: bool | Collection[str]) -> bool:
        if isinstance(wanted, bool):
            return wanted and bool(self._events)
        return any(event.name in wanted for event in self._events)

    def has_ended(self, future: CallFuture) -> bool:
        """Return whether all ranks of a call have answered. Raises the first failure of any rank, if there is
        one."""
        with self._changed:
            self._raise_failure()
            return future.is_complete

    def wait_event(self, timeout_s: float = math.inf) -> Event | None:
        """Block until a rank has sent an event, and return the oldest one that was not taken. Returns None
        after the timeout.

        Raises: like `Future.result`."""
        self._wait_until(lambda: self._events, timeout_s)
        return self._events.popleft() if self._events else None

    def take_events(self, name: str | None = None) -> list[Event]:
        """Return the events of this name, or all (None), that have arrived and were not taken, in their order
        on each rank. Does not block."""
        with self._changed:
            taken = [event for event in self._events if name in (None, event.name)]
            self._events = deque(event for event in self._events if name not in (None, event.name))
        return taken

    def _keep_event(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def wake(self) -> None:
        """Make a loop that waits call `check_interrupt` now. May be called from any thread."""
        with self._changed:
            self._changed.notify_all()

    def _wait_until(self, is_ready: Callable[[], object], timeout_s: float = math.inf) -> None:
        """Block until `is_ready()` or the timeout. Raises: the first failure of any rank; errors of
        `check_interrupt`."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while self.failure is None and not is_ready():
                self.check_interrupt()
                left = min(self._seconds_left(), end - time.monotonic())
                if left <= 0.0:
                    break
                self._wait_for_change(min(left, _TICK_S))
            self._raise_failure()

    def _seconds_left(self) -> float:
        """Return the seconds until the deadline of a call, inf without one. Sets the executor's failure after
        a missed deadline."""
        return math.inf

    def _wait_for_change(self, seconds: float) -> None:
        self._changed.wait(seconds)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    @abstractmethod
    def abort_calls(self) -> None:
        """Ask the ranks to abort the calls in flight where they can, and wait until all calls have ended.
        Their values are not used."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until every issued call has ended. Raises like `Future.result`."""

    # The ranks.

    @abstractmethod
    def health(self, wait_s: float = 3.0) -> Health:
        """Ask every rank for the stack of its main thread, for at most `wait_s` seconds. May be called from
        any thread."""

    @abstractmethod
    def dead_ranks(self) -> list[int]:
        """Return the ranks that have died, or that do not answer within a few seconds.

        This is quicker than `health`. Call it once per graceful shutdown, from another thread than the
        loop's."""

    def where(self) -> str:
        """Return a phrase that says what the loop waits for: "at step 3, waiting for actor.update on rank
        1"."""
        return at_label(self.label).strip() or "before the first step"

    def fail(self, error: RuntimeError) -> None:
        """Make calls and waits raise this error, unless an earlier failure is set. May be called from any
        thread."""
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    @abstractmethod
    def shutdown(self) -> None:
        """Wait for all issued calls, then end the ranks. The executor cannot be used afterwards."""

    @abstractmethod
    def kill(self, exit_code: int) -> None:
        """End the ranks at once, with this exit code. The executor cannot be used afterwards."""


class ProcessExecutor(Executor):
    """An executor whose ranks are processes, which receive signals and die individually."""

    death_first_s = 0.0
    """Seconds to delay the failure of a call, where dead ranks are reported to `fail`.

    The death of one rank makes calls on others raise, and the death should be reported first."""
    is_shutting_down: Callable[[], bool] = staticmethod(lambda: False)
    """Function called after this delay. Returns whether the job ends for a reason other than this failure."""
    on_terminated: Callable[[], None] = staticmethod(lambda: None)
    """Function called, on another thread, when a rank has received SIGTERM."""


def at_label(label: str | None) -> str:
    """Return " at step 3" for "step 3", and "" for None."""
    return "" if label is None else f" at {label}"
