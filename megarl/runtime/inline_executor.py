"""Everything in one process: for unit tests, and for pdb, which then stands where the error is."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence

from megarl.runtime.executor import RemoteError, RoleHandle, at_step, check_role, check_some, check_subset
from megarl.runtime.stop_request import StopRequest
from megarl.runtime.abort import ABORT, Aborted
from megarl.runtime.mailbox import Failure


class InlineFuture:
    """A call that was made already."""

    def __init__(self, role: str, value: object, seconds: float):
        self.role, self._value, self.seconds, self.ended = role, value, seconds, time.time()

    def result(self) -> list:
        return [self._value]

    def first(self) -> object:
        return self._value

    def done(self) -> bool:
        return True


class InlineExecutor:
    """An Executor whose roles are objects of this process, all of them on rank 0.

    A call runs at once and raises at once, with the original exception as cause. Arguments and results still
    go through pickle, so that a loop that works here does not lean on shared objects.
    """

    def __init__(self, roles: dict[str, object]):
        self._roles = roles
        self.failure: RemoteError | None = None
        self._seconds: dict[tuple[str, str], float] = {}
        self.ranks = {role: [0] for role in roles}
        self.step: int | None = None
        self.stop = StopRequest()

    def call(self, role: str, method: str, /, *args: object, **kwargs: object) -> InlineFuture:
        check_role(self.ranks, role)
        if self.failure is not None:
            raise self.failure
        self.stop.before_call(method)
        args, kwargs = pickle.loads(pickle.dumps((args, kwargs)))
        start = time.perf_counter()
        try:
            value = pickle.loads(pickle.dumps(getattr(self._roles[role], method)(*args, **kwargs)))
        except Aborted:
            self.stop.check()
            raise
        except Exception as error:  # the boundary that a process would be
            f = Failure.of(error, role, method, self.step)
            self.failure = RemoteError(role, 0, method, self.step, f.error, f.traceback)
            raise self.failure from error
        seconds = time.perf_counter() - start
        self._seconds[role, method] = self._seconds.get((role, method), 0.0) + seconds
        return InlineFuture(role, value, seconds)

    def call_on(
        self, ranks: Sequence[int], role: str, method: str, /, *args: object, **kwargs: object
    ) -> InlineFuture:
        check_subset(self.ranks, role, ranks)
        return self.call(role, method, *args, **kwargs)

    def wait_any(self, futures: Sequence[InlineFuture]) -> list[InlineFuture]:
        check_some(futures)
        return list(futures)

    def take_seconds(self) -> dict[tuple[str, str], float]:
        taken, self._seconds = self._seconds, {}
        return taken

    def role(self, name: str) -> RoleHandle:
        check_role(self.ranks, name)
        return RoleHandle(self, name)

    def wake(self) -> None:
        """A shutdown is requested: a call that runs on the main thread aborts if its step will be dropped."""
        ABORT.is_requested = self.stop.drops_step

    def ask_who_lives(self) -> list[int]:
        """This process does."""
        return []

    def abort_calls(self) -> None:
        """None is in flight: a call returns, or raises Aborted, before the loop can ask."""

    def where(self) -> str:
        return at_step(self.step).strip() or "before the first step"

    def kill(self, exit_code: int) -> None:
        """Nobody else is to be told."""

    def shutdown(self) -> None:
        self._roles = {}
        self.ranks = {}
