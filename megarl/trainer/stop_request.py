"""Apply a request for a graceful shutdown to the step that runs.

before its first update      the step is dropped: the next call, or wait for one, raises StopRequested
after its first update       the step is finished first"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class StopRequested(BaseException):
    """Raised in the training loop when a graceful shutdown drops the running step, before the step has
    changed any weight.

    The class is no Exception: nothing but the end of the job should catch it."""


class StopRequest:
    """The request to shut one job down gracefully, which is checked before every call and while the loop
    waits.

    A signal handler sets the request. The executor calls `check` before every call and while the loop waits.
    """

    def __init__(self) -> None:
        self.is_armed = False
        """Whether the job handles the request. Only then does a SIGTERM make a request."""
        self.is_requested = False
        """Whether the shutdown was requested."""
        self.has_updated = False
        """Whether the running step has begun to update a model."""
        self._holds = 0

    def request(self) -> None:
        """Request the shutdown. A signal handler calls this."""
        self.is_requested = True

    def begin_update(self) -> None:
        """Note that a model is about to be updated, so that a later request lets the step finish. Raises
        StopRequested if the request is already there."""
        self.check()
        self.has_updated = True

    def check(self) -> None:
        """Raise StopRequested if a shutdown was requested and the running step has not updated a model
        yet."""
        drops_step = not self.has_updated and not self._holds
        if self.is_requested and self.is_armed and drops_step:
            raise StopRequested

    def step_completed(self) -> None:
        """Note that the step is over: the next one can be dropped again."""
        self.has_updated = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let `check` raise nothing within this context, for work that must not be interrupted half-way."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
