"""Apply a request for a graceful shutdown to the step that runs.

before its first update      the step is dropped: the next call, or wait for one, raises StopRequested
after its first update       the step is finished first"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class StopRequested(BaseException):
    """Raised in the loop of a job that shuts down, where its weights are those of a completed step.

    The class is no Exception: nothing but the end of the job should catch it."""


class StopRequest:
    """The request to shut one job down.

    A signal handler sets the request. The executor calls `check` before every call and while the loop waits.
    """

    def __init__(self) -> None:
        self.is_armed = False
        """Whether the job handles the request. Only then does a SIGTERM make a request."""
        self.is_requested = False
        """Whether the shutdown was requested."""
        self._has_updated = False
        self._holds = 0

    def request(self) -> None:
        """Ask for the shutdown."""
        self.is_requested = True

    def begin_update(self) -> None:
        """Note that a model is about to be updated: from here on the step is finished.

        Raises: StopRequested."""
        self.check()
        self._has_updated = True

    def check(self) -> None:
        """Raise StopRequested if the running step is to be dropped."""
        drops_step = not self._has_updated and not self._holds
        if self.is_requested and self.is_armed and drops_step:
            raise StopRequested

    def step_completed(self) -> None:
        """Note that the step is over: the next one can be dropped again."""
        self._has_updated = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Raise nothing within this context, which must not be interrupted half-way."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
