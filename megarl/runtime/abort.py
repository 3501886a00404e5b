"""Aborting work that may take long, because the job shuts down. The driver asks for it; an engine heeds it
between two of its steps.

The ranks of one engine must stop before the same step, or the others would wait for them in a collective.
They take each step together, so none is more than one step ahead: once every rank knows of the abort, the
engine's first rank names the step after its next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Aborted(Exception):
    """The call was aborted: its caller has no use for a result any more."""


class KeyValueStore(Protocol):
    """What the ranks of an engine write to each other; torch's store is one."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class AbortToken:
    """Says whether the calls of this process are to be aborted."""

    def __init__(self) -> None:
        self.is_requested = False
        self.all_ranks_know = False
        """Set after every rank's `is_requested`."""
        self.store: KeyValueStore | None = None
        """Set before `is_requested`."""

    def check(self) -> None:
        """Raise Aborted if an abort is requested. For work in which no other rank takes part."""
        if self.is_requested:
            raise Aborted


ABORT = AbortToken()
"""The token of this process."""


class AbortableEngine:
    """Makes the `step` of an engine raise Aborted once an abort is requested.

    Args:
        engine: vLLM's; its `step` is called until all requests are complete.
        name: the same on all ranks of the engine; other engines have other names.
        rank, size: of this process among those that take the engine's steps together."""

    def __init__(
        self, engine: object, name: str = "", rank: int = 0, size: int = 1, token: AbortToken = ABORT
    ) -> None:
        self._step: Callable[[], object] = engine.step
        self._name, self._rank, self._size, self._token = name, rank, size, token
        self._number = 0  # of the next step, since the engine was started
        self._first_aborted: int | None = None  # the step before which all ranks stop
        engine.step = self.step

    def step(self) -> object:
        """Take the engine's next step, or raise Aborted."""
        if self._token.is_requested:
            self._abort_together()
        self._number += 1
        return self._step()

    def _abort_together(self) -> None:
        if self._size == 1:
            raise Aborted
        store, key = self._token.store, f"abort/{self._name}"
        if self._first_aborted is None and self._rank > 0 and store.check([key]):
            self._first_aborted = int(store.get(key))
        if self._first_aborted is not None and self._number >= self._first_aborted:
            raise Aborted
        if self._first_aborted is None and self._rank == 0 and self._token.all_ranks_know:
            self._first_aborted = self._number + 1
            store.set(key, str(self._first_aborted))
