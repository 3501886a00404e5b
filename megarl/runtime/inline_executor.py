"""Run all roles in one process, for unit tests and for pdb, which stops where the error is."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from megarl.runtime.abort import ABORT, Aborted
from megarl.runtime.executor import CallFuture, Capabilities, Executor, Health, RemoteError
from megarl.runtime.hosting import HostedRoles, Roles, WorkerContext, stack_of_call
from megarl.runtime.messages import Call, Failure

_TICK_S = 0.1  # interval of `check_interrupt`


class InlineExecutor(Executor):
    """An executor whose roles are objects of this process, all of them on rank 0. A call has ended when
    `call` returns.

    A call runs at once and raises at once, with the original exception as cause. Arguments and results are
    encoded and decoded as for another process, so a loop cannot come to rely on shared objects. The idle hook
    takes its steps while the loop waits for an event.

    Args:
        roles: see `hosting.Roles`.
        interfaces: as in Executor."""

    capabilities = Capabilities(
        overlap=False, deadlines=False, rank_processes=False, survives_worker_death=False
    )

    def __init__(self, roles: Roles, interfaces: Mapping[str, type] | None = None) -> None:
        super().__init__({}, interfaces)
        self._context = WorkerContext(0, self._keep_event)
        self._thread = threading.current_thread()
        self._hosted = HostedRoles(roles(self._context) if callable(roles) else roles, 0)
        self.ranks = {role: [0] for role in self._hosted.by_name}

    @property
    def roles(self) -> dict[str, object]:
        """Objects of the roles by name, for a debugger."""
        return self._hosted.by_name

    def _issue(self, call: Call) -> CallFuture:
        self._raise_failure()
        self.check_interrupt()
        future = CallFuture(self, call.role, call.method, call.ranks)
        index, self.num_calls = self.num_calls, self.num_calls + 1
        try:
            self._keep_value(future, self._hosted.run(call, index))
        except Aborted:
            self.check_interrupt()
            raise
        except Exception as error:  # process boundary of other executors
            self._raise_remote(error, Failure.of(error, call.role, call.method, call.label))
        return future

    def _wait_until(self, is_ready: Callable[[], object], timeout_s: float = math.inf) -> None:
        end = time.monotonic() + timeout_s
        while self.failure is None and not is_ready():
            self.check_interrupt()
            left = min(_TICK_S, end - time.monotonic())
            if left <= 0.0:
                break
            if not self._take_idle_step():  # without the lock, which events of other threads need
                with self._changed:
                    self._changed.wait_for(is_ready, left)
        self._raise_failure()

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
        """Raise the error of an earlier call, if there is one. No call is in flight."""
        self._raise_failure()

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
            return not hook.agree(False) and hook.step()
        except Exception as error:  # process boundary of other executors
            self._raise_remote(error, Failure.of(error, hook.role, hook.method, self.label))

    def _raise_remote(self, error: Exception, failure: Failure) -> NoReturn:
        self.failure = RemoteError(0, failure)
        raise self.failure from error
