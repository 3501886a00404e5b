"""Name what a rank is doing, for a profiler: NVTX ranges under Nsight Systems, or ranges of PyTorch's
profiler.

    with profile_range("micro_batch/forward"):
        ...
    @profiled("optimizer/step")
    def step(self): ...

Nothing is recorded until a profiler is started (megarl/workers/profiler.py). Until then both forms only look
at one variable, and no range is made. This module imports no torch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Range = contextlib.AbstractContextManager[object]
_NO_RANGE: Range = contextlib.nullcontext()  # one for all, because it has no state


class Recorder(Protocol):
    """The interface of a profiler that marks ranges while it records."""

    def range(self, name: str) -> Range:
        """Return the range of a part of a call, as a context manager."""

    def call(self, role: str, method: str, label: str | None) -> Range:
        """Return the ranges of a call of the driver, as a context manager.

        Args:
            label: label of the call ("step 3")."""


_recorder: Recorder | None = None


def record_with(recorder: Recorder | None) -> None:
    """Hand all ranges of this process to a recorder, or to none."""
    global _recorder
    _recorder = recorder


def is_recording() -> bool:
    """Return whether a profiler records the ranges of this process."""
    return _recorder is not None


def profile_range(name: str) -> Range:
    """Return a context manager that marks its body as a range of this name, if a profiler records."""
    return _NO_RANGE if _recorder is None else _recorder.range(name)


def call_ranges(role: str, method: str, label: str | None) -> Range:
    """Return a context manager that marks its body as a call of the driver, if a profiler records."""
    return _NO_RANGE if _recorder is None else _recorder.call(role, method, label)


def profiled(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make every call of the decorated function a range of this name, if a profiler records."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with profile_range(name):
                return function(*args, **kwargs)

        return call

    return decorate
