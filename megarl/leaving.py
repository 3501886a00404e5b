"""Leaving work that may take long, because the job is to end: asked for by the driver, heeded between two
steps of an engine.

The ranks of one engine must leave it before the same step, or those that stay wait for the others in a
collective. They take that step together, so none is more than one ahead: once every rank knows that it is
asked, the engine's first rank names the step after its next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Left(Exception):
    """Of a call that was left. Its caller has no use for a result any more."""


class Board(Protocol):
    """What the ranks of an engine write to each other: torch's store."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class Leaving:
    """Of this process."""

    def __init__(self) -> None:
        self.is_asked = False
        self.are_all_asked = False
        """Set after every rank's `is_asked`."""
        self.board: Board | None = None
        """Set before `is_asked`."""

    def check(self) -> None:
        """Raise Left if asked, where no other rank takes part in the work."""
        if self.is_asked:
            raise Left


LEAVING = Leaving()


class LeavableEngine:
    """An engine whose `step` raises Left when asked.

    Args:
        engine: vLLM's; its `step` is called until all requests are complete.
        name: the same on all ranks of the engine, another than other engines'.
        rank, size: of this process among those that take the engine's steps together."""

    def __init__(
        self, engine: object, name: str = "", rank: int = 0, size: int = 1, leaving: Leaving = LEAVING
    ) -> None:
        self._step: Callable[[], object] = engine.step
        self._name, self._rank, self._size, self._leaving = name, rank, size, leaving
        self._number = 0  # of the next step, since the engine was started
        self._last: int | None = None  # before which it is left
        engine.step = self.step

    def step(self) -> object:
        if self._leaving.is_asked:
            self._leave_in_time()
        self._number += 1
        return self._step()

    def _leave_in_time(self) -> None:
        if self._size == 1:
            raise Left
        board, key = self._leaving.board, f"leave/{self._name}"
        if self._last is None and self._rank > 0 and board.check([key]):
            self._last = int(board.get(key))
        if self._last is not None and self._number >= self._last:
            raise Left
        if self._last is None and self._rank == 0 and self._leaving.are_all_asked:
            self._last = self._number + 1
            board.set(key, str(self._last))
