"""Define the result of a call that may still be running."""

from __future__ import annotations

from typing import Generic, TypeVar

R = TypeVar("R")


class Future(Generic[R]):
    """The values that a call will return, one per rank."""

    role: str
    """Name of the role that was called."""
    seconds: float = 0.0
    """Seconds of the call on its slowest rank, without earlier calls. 0 until done."""
    ended: float = 0.0
    """`time.time()` when the last rank had finished. 0 until done."""

    def result(self) -> list[R]:
        """Return the values per rank, in the order of the role's ranks. Blocks.

        Raises: the first error of the job, whichever call it came from."""
        raise NotImplementedError

    def first(self) -> R:
        """Return the value of the role's first rank. Waits for all ranks."""
        return self.result()[0]

    def done(self) -> bool:
        """Return whether `result` would return at once. Raises like `result`."""
        raise NotImplementedError
