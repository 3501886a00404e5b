"""Whether the job is to end, and what that means for the calls of the step that runs.

before its first update      the step is dropped: the next call, or wait for one, raises StopRequested
from then on                 it is finished first"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class StopRequested(BaseException):
    """In the loop of a job that is to end in order, where its weights are those of a whole step. Not an
    Exception: nothing but the end of the job is to catch it."""


class StopRequest:
    """Of one executor. Set by a signal handler, looked at by the loop's thread alone."""

    def __init__(self) -> None:
        self.is_armed = False
        """Somebody acts on it: a SIGTERM is a request."""
        self.requested_at: float | None = None
        """time.monotonic()."""
        self._has_updated = False
        self._holds = 0

    def request(self) -> None:
        self.requested_at = self.requested_at or time.monotonic()

    def before_call(self, method: str) -> None:
        """Raises: StopRequested."""
        self.check()
        self._has_updated = self._has_updated or method == "update"

    def check(self) -> None:
        """While the loop waits. Raises: StopRequested."""
        if self.requested_at is not None and self.is_armed and self.drops_step:
            raise StopRequested

    @property
    def drops_step(self) -> bool:
        """Whether a stop now would drop the step that runs."""
        return not self._has_updated and not self._holds

    def step_is_whole(self) -> None:
        self._has_updated = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Not in here: what must not be done by halves."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
