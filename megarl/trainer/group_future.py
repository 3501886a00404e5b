"""Wait until an actor's buffer has the groups that a step trains on, whichever call or event brings them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from megarl.futures import Future
from megarl.runtime.executor import CallTimeout, Executor

_TICK_S = 2.0  # longest time between two looks that counts as waiting: this process may have been stopped


class GroupFuture(Future[Any]):
    """The future of `Rollout.generate` in a step: done when the call has ended and the step has its groups.

    Args:
        call: future of the call, whose values are the result.
        is_ready: takes the groups that engines have reported, and returns whether the step has all that it
            needs.
        num_reported: returns how many samples engines have reported so far.
        ranks: ranks of the role, which a timeout names."""

    def __init__(
        self,
        executor: Executor,
        call: Future[Any],
        is_ready: Callable[[], bool],
        num_reported: Callable[[], int],
        ranks: list[int],
    ) -> None:
        self.role, self._call, self._is_ready, self._ranks = call.role, call, is_ready, ranks
        self._executor, self._label, self._num_reported = executor, executor.label, num_reported
        self._start = self._last_look = time.monotonic()
        self._last_number, self._silent_s = num_reported(), 0.0
        self.waited_s = 0.0
        """Seconds from the end of the call until the groups were there; 0 until done."""
        self._is_done = False

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self._call.seconds + self.waited_s

    @property
    def ended(self) -> float:  # type: ignore[override]
        return self._call.ended + self.waited_s

    def result(self) -> list[Any]:
        self._executor.wait_any([self])
        return self._call.result()

    def done(self) -> bool:
        if not self._is_done and self._call.done():
            self._is_done = self._is_ready()
            if self._is_done and self._last_look > self._start:
                self.waited_s = max(0.0, time.monotonic() - self._start - self._call.seconds)
            elif not self._is_done:
                self._check_deadline()
        return self._is_done

    def _check_deadline(self) -> None:
        """Raise CallTimeout if no engine has reported anything for the time that a call may take."""
        now, number = time.monotonic(), self._num_reported()
        self._silent_s += min(now - self._last_look, _TICK_S)
        if number != self._last_number:
            self._silent_s, self._last_number = 0.0, number
        self._last_look = now
        limit = self._executor.call_timeout_s
        if self._silent_s > limit:
            stacks = self._executor.health().stacks
            error = CallTimeout(self.role, "generate", self._label, self._ranks, [], limit, stacks)
            self._executor.fail(error)
            raise error
