"""The seam between what the driver says and how it gets to the ranks. Nothing above it knows which executor
runs.

    updated = actor.update(step)         a future, at once
    metrics = updated.result()           one value per rank of the role, in the order of its ranks

Calls on disjoint ranks overlap; calls on one rank run in the order issued. Arguments and results travel by
pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from megarl.runtime.stop_request import StopRequest


class RemoteError(RuntimeError):
    """A method of a role raised on one rank. The message is complete: role, rank, method, step, error and
    remote traceback."""

    def __init__(
        self, role: str, rank: int, method: str, step: int | None, error: str, remote_traceback: str
    ):
        super().__init__(f"[{role} rank {rank}] {method} failed{at_step(step)}: {error}\n{remote_traceback}")
        self.role, self.rank, self.method, self.step, self.error, self.remote_traceback = (
            role,
            rank,
            method,
            step,
            error,
            remote_traceback,
        )


class CallTimeout(RuntimeError):
    """A call took longer than the deadline. `ranks` are those that did not answer; `stacks` is where Python
    was on each rank that says so; None: nobody was asked."""

    def __init__(
        self,
        role: str,
        method: str,
        step: int | None,
        ranks: list[int],
        answered: list[int],
        timeout_s: float,
        stacks: Mapping[int, str] | None = None,
    ):
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        silent = [] if stacks is None else [rank for rank in ranks if rank not in stacks]
        others = f" (answered: {', '.join(map(str, answered))})" if answered else ""
        super().__init__(
            f"[{role}] {method} timed out{at_step(step)}: no answer from {named}{others} within "
            f"call_timeout_s ({timeout_s:g} s). "
            "Raise --call-timeout-s if the call is merely slow."
            + "".join(
                f"\n[rank {rank}] does not say where it is: stopped, or in native code that keeps "
                "Python's lock."
                for rank in silent
            )
            + "".join(f"\n[rank {rank}] was here:\n{stack}" for rank, stack in sorted((stacks or {}).items()))
        )
        self.role, self.method, self.step, self.ranks = role, method, step, ranks


class Future(Protocol):
    """What a call will return."""

    role: str
    """That was called."""
    seconds: float
    """That the call took on the rank where it took longest, not counting calls before it. 0 until done."""
    ended: float
    """`time.time()` of the last rank when it was through. 0 until done."""

    def result(self) -> list:
        """Values per rank, in the order of the role's ranks. Blocks. Raises the first error of the job,
        whichever call it came from."""

    def first(self) -> object:
        """The value of the role's first rank. Waits for all of them."""

    def done(self) -> bool:
        """Whether `result` would return at once. Raises like `result`."""


class Executor(Protocol):
    """Runs methods of roles on their ranks."""

    ranks: dict[str, list[int]]
    step: int | None
    """Set by the loop: calls carry it, errors name it."""
    stop: StopRequest
    """Calls and waits raise StopRequested when it says so."""

    def call(self, role: str, method: str, /, *args: object, **kwargs: object) -> Future: ...

    def call_on(
        self, ranks: Sequence[int], role: str, method: str, /, *args: object, **kwargs: object
    ) -> Future:
        """Call only these ranks of the role. `result` has their values in the order of `ranks`."""

    def wait_any(self, futures: Sequence[Future]) -> list[Future]:
        """Block until at least one is done. Returns those that are. Raises like `Future.result`; ValueError
        for no futures."""

    def role(self, name: str) -> RoleHandle: ...

    def take_seconds(self) -> dict[tuple[str, str], float]:
        """(role, method) -> seconds of all its calls that ended since this was last asked, each as in
        `Future.seconds`."""

    def shutdown(self) -> None:
        """End the workers after everything that was called. The executor cannot be used afterwards."""


class RoleHandle:
    """A role that reads like a local object: `actor.update(x)` is `executor.call("actor", "update", x)`."""

    def __init__(self, executor: Executor, role: str):
        self._executor, self._role = executor, role

    def __getattr__(self, method: str):
        if method.startswith("_"):
            raise AttributeError(f"{method} cannot be called on role {self._role}: it is private.")
        return lambda *args, **kwargs: self._executor.call(self._role, method, *args, **kwargs)

    def __repr__(self) -> str:
        return f"RoleHandle({self._role}, ranks={self._executor.ranks[self._role]})"


def check_role(ranks: dict[str, list[int]], role: str) -> None:
    """Raise ValueError if there is no such role."""
    if role not in ranks:
        raise ValueError(
            f"role ({role!r}) is not placed on any rank. Placed roles: {', '.join(sorted(ranks))}."
        )


def check_subset(ranks: dict[str, list[int]], role: str, subset: Sequence[int]) -> None:
    """Raise ValueError if these are not ranks of the role, each once."""
    check_role(ranks, role)
    if not subset or len(set(subset)) < len(subset) or not set(subset) <= set(ranks[role]):
        raise ValueError(
            f"ranks ({list(subset)}) must be some of those of role {role} ({ranks[role]}), each "
            f"once. Try {ranks[role][:1]}."
        )


def check_some(futures: Sequence[Future]) -> None:
    """Raise ValueError if there is nothing to wait for."""
    if not futures:
        raise ValueError("wait_any needs at least one future: it would wait for ever.")


def at_step(step: int | None) -> str:
    return "" if step is None else f" at step {step}"
