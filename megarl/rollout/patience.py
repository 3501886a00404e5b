"""Decide when an engine that does not answer counts as hanging."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHORTEST_S, _STEPS = 10.0, 10
_FIRST_STEP_S = 6.0  # stands for the longest step before one has ended: the first may compile kernels
_SLICE_S = 1.0  # longest time between two looks that counts: this process may have been stopped


class Patience:
    """The time that an engine may take for an answer: 10 s, or ten times its longest step if that is more.

    Only time counts in which this process waits for the engine.

    Args:
        is_limited: whether an engine can count as hanging while it takes a step."""

    def __init__(self, is_limited: bool = False) -> None:
        self.is_limited = is_limited
        self.has_stepped = False
        """Whether the engine has ended a step."""
        self._longest_s = 0.0

    @property
    def limit_s(self) -> float:
        longest_s = self._longest_s if self.has_stepped else max(_FIRST_STEP_S, self._longest_s)
        return max(_SHORTEST_S, _STEPS * longest_s)

    def note_step(self, seconds: float) -> None:
        """Remember the duration of a step if it is the longest so far."""
        self.has_stepped = True
        self.note_wait(seconds)

    def note_wait(self, seconds: float) -> None:
        """Remember how long the engine took for an answer between two steps, which may be most of a step."""
        self._longest_s = max(self._longest_s, seconds)

    def wait(self, poll: Callable[[float], bool], timeout_s: float) -> tuple[bool, float]:
        """Call `poll` with some seconds to wait until it returns True, for `timeout_s` in all. Returns
        whether it did, and how long this took."""
        waited_s = 0.0
        while True:
            wait_s = min(_SLICE_S, timeout_s - waited_s)
            start = time.monotonic()
            is_there = poll(max(0.0, wait_s))
            waited_s += min(time.monotonic() - start, max(0.0, wait_s))
            if is_there or waited_s >= timeout_s:
                return is_there, waited_s
