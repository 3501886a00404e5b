"""Define what `shutdown.py` needs of the training loop and of the rank processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class ShutdownRequest(Protocol):
    """A request for a graceful shutdown, which a signal handler sets and the training loop handles."""

    is_armed: bool
    """Whether the loop handles a request now."""
    is_requested: bool
    """Whether the shutdown was requested."""

    def request(self) -> None:
        """Request the shutdown. The signal handler calls this."""


class Processes(Protocol):
    """The rank processes, if they are this process's children."""

    on_signal: Callable[[int], bool]
    """Called on another thread after SIGTERM or SIGINT ended a rank. Returns whether that ends the job."""

    def expect_end(self) -> None:
        """Declare that ranks may end from now on: their end is no longer reported as a failure."""

    def end(self, wait_s: float) -> None:
        """Wait `wait_s` seconds for the ranks to exit, then kill those that remain."""

    def kill(self) -> None:
        """Kill the ranks at once, without waiting."""
