"""Let a rank stop long work, such as sampling, when the driver shuts the job down: an engine stops between
two of its steps.

The ranks of one engine must stop before the same step, or the others would wait for them in a collective. The
ranks take each step together, so no rank is more than one step ahead. Once every rank knows of the abort, the
engine's first rank announces the step before which all ranks stop. This is the step after its next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from megarl.runtime.key_value_store import KeyValueStore


class Aborted(Exception):
    """Raised inside a call that the driver has aborted: nobody needs its result any more."""


class AbortToken:
    """Holds whether the driver wants the calls of this process to be aborted."""

    def __init__(self) -> None:
        self.is_requested = False
        self.all_ranks_know = False
        """Whether every rank has set `is_requested`."""
        self.store: KeyValueStore | None = None
        """Store of the engine's ranks. Must be set before `is_requested`."""

    def check(self) -> None:
        """Raise Aborted if an abort is requested. Only for work that no other rank takes part in."""
        if self.is_requested:
            raise Aborted


ABORT = AbortToken()
"""The abort token of this process."""


class Engine(Protocol):
    """Protocol of a vLLM engine. This module replaces its `step` by one that looks for aborts first."""

    step: Callable[[], object]


class AbortableEngine:
    """Replaces an engine's `step` by one that raises Aborted once an abort is requested, before the same step
    on all of its ranks.

    Args:
        engine: its `step` is called until all requests are complete.
        name: the same on all ranks of the engine, different for other engines.
        rank, size: place of this process among the ranks that take the engine's steps together."""

    def __init__(
        self, engine: Engine, name: str = "", rank: int = 0, size: int = 1, token: AbortToken = ABORT
    ) -> None:
        self._step = engine.step
        self._name, self._rank, self._size, self._token = name, rank, size, token
        self._number = 0  # number of the next step since the start of the engine
        self._first_aborted: int | None = None  # the step before which all ranks stop
        engine.step = self.step

    def step(self) -> object:
        """Take the engine's next step and return its result, or raise Aborted."""
        if self._token.is_requested:
            self._abort_together()
        self._number += 1
        return self._step()

    def _abort_together(self) -> None:
        store, key = self._token.store, f"abort/{self._name}"
        if self._size == 1:
            raise Aborted
        assert store is not None
        if self._first_aborted is None:
            if self._rank > 0 and store.check([key]):
                self._first_aborted = int(store.get(key))
            elif self._rank == 0 and self._token.all_ranks_know:
                self._first_aborted = self._number + 1
                store.set(key, str(self._first_aborted))
        if self._first_aborted is not None and self._number >= self._first_aborted:
            raise Aborted
