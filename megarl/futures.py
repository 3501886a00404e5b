"""Define the future that a call on ranks returns."""

from __future__ import annotations

from typing import Generic, TypeVar

R = TypeVar("R")


class Future(Generic[R]):
    """The result of a call that may still be running: one value per rank of the role."""

    role: str
    """Name of the role that was called."""
    seconds: float = 0.0
    """Seconds of the call on its slowest rank, without earlier calls. 0 until done."""
    ended: float = 0.0
    """`time.time()` when the last rank had finished. 0 until done."""

    def result(self) -> list[R]:
        """Wait for the call, and return the values of its ranks in their order. Raises the first error of the
        job, whichever call it came from."""
        raise NotImplementedError

    def first(self) -> R:
        """Wait for all ranks, and return the value of the role's first rank."""
        return self.result()[0]

    def done(self) -> bool:
        """Return whether `result` would return at once. Raises like `result`."""
        raise NotImplementedError
