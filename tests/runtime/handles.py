"""Call the undeclared roles of these tests like local objects."""

from __future__ import annotations

from collections.abc import Callable

from megarl.runtime.executor import CallFuture, Executor


class Handle:
    """`Handle(executor, "left").echo(1)` is `executor.call("left", "echo", 1)`."""

    def __init__(self, executor: Executor, role: str) -> None:
        self._executor, self._role = executor, role

    def __getattr__(self, method: str) -> Callable[..., CallFuture]:
        return lambda *args, **kwargs: self._executor.call(self._role, method, *args, **kwargs)
