"""Run all roles in one process, for unit tests and for pdb, which stops where the error is."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from megarl.runtime.abort import ABORT, Aborted
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
from megarl.runtime.hosting import HostedRoles, Roles, WorkerContext, stack_of_call
from megarl.runtime.messages import Call, Event, Failure, decode_result, encode_arguments

_TICK_S = 0.1  # interval of `check_interrupt`


class InlineFuture:
    """A call that has already ended."""

    def __init__(self, role: str, value: object, seconds: float, ended: float):
        self.role, self._value, self.seconds, self.ended = role, value, seconds, ended

    def result(self) -> list:
        return [self._value]

    def first(self) -> object:
        return self._value

    def done(self) -> bool:
        return True


class InlineExecutor:
    """An executor whose roles are objects of this process, all of them on rank 0.

    A call runs at once and raises at once, with the original exception as cause. Arguments and results are
    encoded and decoded as for another process, so a loop cannot come to rely on shared objects. The idle hook
    takes its steps while the loop waits for an event.

    Args:
        roles: see `hosting.Roles`.
        interfaces: as in StoreExecutor."""

    capabilities = Capabilities(
        overlap=False, deadlines=False, rank_processes=False, survives_worker_death=False
    )

    def __init__(self, roles: Roles, interfaces: Mapping[str, type] | None = None):
        self.failure: RuntimeError | None = None
        self.label: str | None = None
        self.check_interrupt: Callable[[], None] = lambda: None
        self.call_timeout_s: float | None = None
        self.num_calls = 0
        self._interfaces = dict(interfaces or {})
        self._seconds: dict[tuple[str, str], float] = {}
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._context = WorkerContext(0, self._keep_event)
        self._thread = threading.current_thread()
        self._hosted = HostedRoles(roles(self._context) if callable(roles) else roles, 0)
        self.ranks = {role: [0] for role in self._hosted.by_name}

    @property
    def roles(self) -> dict[str, object]:
        """Objects of the roles by name, for a debugger."""
        return self._hosted.by_name

    def call(self, role: str, method: str, /, *args: object, **kwargs: object) -> InlineFuture:
        check_role(self.ranks, role)
        if self.failure is not None:
            raise self.failure
        self.check_interrupt()
        call = Call(role, (0,), method, self.label, encode_arguments(role, method, args, kwargs))
        index, self.num_calls = self.num_calls, self.num_calls + 1
        try:
            reply = self._hosted.run(call, index)
            value = decode_result(self._interfaces.get(role), method, reply.value)
        except Aborted:
            self.check_interrupt()
            raise
        except Exception as error:  # process boundary of other executors
            f = Failure.of(error, role, method, self.label)
            self.failure = RemoteError(role, 0, method, self.label, f.error, f.traceback)
            raise self.failure from error
        self._seconds[role, method] = self._seconds.get((role, method), 0.0) + reply.seconds
        return InlineFuture(role, value, reply.seconds, reply.ended)

    def call_on(
        self, ranks: Sequence[int], role: str, method: str, /, *args: object, **kwargs: object
    ) -> InlineFuture:
        check_subset(self.ranks, role, ranks)
        return self.call(role, method, *args, **kwargs)

    def wait_any(self, futures: Sequence[InlineFuture], or_event: bool = False) -> list[InlineFuture]:
        check_some(futures)
        if self.failure is not None:
            raise self.failure
        return list(futures)

    def wait_event(self, timeout_s: float | None = None) -> Event | None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._events:
            if self.failure is not None:
                raise self.failure
            self.check_interrupt()
            left = _TICK_S if end is None else min(_TICK_S, end - time.monotonic())
            if left <= 0.0:
                return None
            if not self._take_idle_step():
                with self._changed:
                    self._changed.wait_for(lambda: self._events, left)
        return self._events.popleft()

    def take_events(self) -> list[Event]:
        with self._changed:
            taken = list(self._events)
            self._events.clear()
        return taken

    def take_seconds(self) -> dict[tuple[str, str], float]:
        taken, self._seconds = self._seconds, {}
        return taken

    def role(self, name: str) -> RoleHandle:
        check_role(self.ranks, name)
        return RoleHandle(self, name)

    def wake(self) -> None:
        """Abort the current call of the loop's thread if `check_interrupt` would interrupt the loop."""
        try:
            self.check_interrupt()
        except BaseException:  # the loop's thread raises its own error after the call
            ABORT.is_requested = True

    def dead_ranks(self) -> list[int]:
        return []

    def health(self, wait_s: float = 0.0) -> Health:
        return Health({0: stack_of_call(self._thread)})

    def abort_calls(self) -> None:
        """Do nothing: a call returns or raises Aborted before the loop can ask."""

    def drain(self) -> None:
        """Raise the failure, if there is one. No call is in flight."""
        if self.failure is not None:
            raise self.failure

    def where(self) -> str:
        return at_label(self.label).strip() or "before the first step"

    def fail(self, error: RuntimeError) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def kill(self, exit_code: int) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        self._hosted.by_name.clear()
        self._context.idle_hook = None
        self.ranks = {}

    def _take_idle_step(self) -> bool:
        hook = self._context.idle_hook
        if hook is None:
            return False
        try:
            return not hook.agree(bool(self._events)) and hook.step()
        except Exception as error:  # process boundary of other executors
            f = Failure.of(error, "worker", "idle step", None)
            self.failure = RemoteError("worker", 0, "idle step", None, f.error, f.traceback)
            raise self.failure from error

    def _keep_event(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()
