"""The protocol between a driver and its ranks. Nothing above it knows which executor runs, and no executor
knows what a role or a step is.

    updated = actor.update(step)         a future, at once
    metrics = updated.result()           one value per rank of the role, in the order of its ranks

create      a factory makes an executor over its ranks; `ranks` and `capabilities` say what it has
call        call, call_on, role: calls on disjoint ranks overlap; calls on one rank run in the order issued
wait        Future.result, wait_any, wait_event: `check_interrupt` can end each of them
events      take_events, wait_event: what ranks report at a time of their own
abort       abort_calls: calls in flight end early where they can, their values are of no use
drain       drain: wait for every call that was issued
health      health: which ranks answer, and where each of them is
shut down   shutdown: the ranks end after everything that was called
kill        kill: the ranks end at once

Arguments, results and events are messages of declared types (messages.py). tests/runtime/executor_contract.py
tests all of this for any executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megarl.runtime.messages import Event


@dataclass(frozen=True)
class Capabilities:
    """What an executor can do beyond running calls in their order."""

    overlap: bool
    """Calls on disjoint ranks run at the same time; else a call has ended when `call` returns."""
    deadlines: bool
    """A call that takes longer than `call_timeout_s` is a CallTimeout that shows where the ranks are."""
    rank_processes: bool
    """Ranks are processes of their own: one that dies is a failure, and none of them is left after the
    end."""
    survives_worker_death: bool
    """The other ranks can be called after one has died."""


@dataclass(frozen=True)
class Health:
    """Which ranks live."""

    stacks: dict[int, str]
    """Rank -> where its main thread is, for those that have answered."""
    silent: list[int] = field(default_factory=list)
    """Ranks that have not answered: dead, stopped, or in native code that keeps Python's lock."""


class RemoteError(RuntimeError):
    """A method raised on a rank. The message has role, rank, method, label, error and remote traceback."""

    def __init__(
        self, role: str, rank: int, method: str, label: str | None, error: str, remote_traceback: str
    ):
        super().__init__(
            f"[{role} rank {rank}] {method} failed{at_label(label)}: {error}\n{remote_traceback}"
        )
        self.role, self.rank, self.method, self.label = role, rank, method, label
        self.error, self.remote_traceback = error, remote_traceback


class CallTimeout(RuntimeError):
    """A call took longer than the deadline.

    Args:
        ranks: those that did not answer.
        stacks: where Python was on each rank that has said so; None: nobody was asked."""

    def __init__(
        self,
        role: str,
        method: str,
        label: str | None,
        ranks: list[int],
        answered: list[int],
        timeout_s: float,
        stacks: Mapping[int, str] | None = None,
    ):
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        silent = [] if stacks is None else [rank for rank in ranks if rank not in stacks]
        others = f" (answered: {', '.join(map(str, answered))})" if answered else ""
        super().__init__(
            f"[{role}] {method} timed out{at_label(label)}: no answer from {named}{others} within "
            f"call_timeout_s ({timeout_s:g} s). "
            "Raise --call-timeout-s if the call is merely slow."
            + "".join(
                f"\n[rank {rank}] does not say where it is: stopped, or in native code that keeps "
                "Python's lock."
                for rank in silent
            )
            + "".join(f"\n[rank {rank}] was here:\n{stack}" for rank, stack in sorted((stacks or {}).items()))
        )
        self.role, self.method, self.label, self.ranks = role, method, label, ranks


class Future(Protocol):
    """What a call will return."""

    role: str
    """Name of the role that was called."""
    seconds: float
    """Time that the call took on the rank where it took longest, not counting calls before it. 0 until
    done."""
    ended: float
    """`time.time()` when the last rank had finished. 0 until done."""

    def result(self) -> list:
        """Return the values per rank, in the order of the role's ranks. Blocks. Raises the first error of the
        job, whichever call it came from."""

    def first(self) -> object:
        """Return the value of the role's first rank. Waits for all of them."""

    def done(self) -> bool:
        """Return whether `result` would return at once. Raises like `result`."""


class Executor(Protocol):
    """Runs methods of roles on their ranks."""

    capabilities: Capabilities
    ranks: dict[str, list[int]]
    """Role -> its ranks."""
    label: str | None
    """Set by the loop, "step 3" for example: calls carry it, errors name it."""
    check_interrupt: Callable[[], None]
    """Set by the loop; called on its thread before a call is issued and while it waits. What it raises
    interrupts the loop."""
    failure: RuntimeError | None
    """The first failure of any rank; from then on calls and waits raise it."""
    call_timeout_s: float | None
    """Seconds that a rank may take for one call, from when it is free to start it. None: no deadlines."""

    @property
    def num_calls(self) -> int:
        """Return how many calls were issued."""

    def call(self, role: str, method: str, /, *args: object, **kwargs: object) -> Future:
        """Call a method on all ranks of the role. Raises: CannotSend that names role, method and argument."""

    def call_on(
        self, ranks: Sequence[int], role: str, method: str, /, *args: object, **kwargs: object
    ) -> Future:
        """Call only these ranks of the role. `result` has their values in the order of `ranks`."""

    def role(self, name: str) -> RoleHandle:
        """Return the role as an object with methods. Raises: ValueError if there is no such role."""

    def wait_any(self, futures: Sequence[Future], or_event: bool = False) -> list[Future]:
        """Block until at least one is done. Returns those that are. Raises like `Future.result`; ValueError
        for no futures.

        or_event: return as soon as an event waits to be taken, too, and then maybe no future."""

    def wait_event(self, timeout_s: float | None = None) -> Event | None:
        """Take the oldest event, and block until there is one. None: there was none in time. Raises like
        `Future.result`."""

    def take_events(self) -> list[Event]:
        """Take all events that have arrived, in their order on each rank. Does not block."""

    def take_seconds(self) -> dict[tuple[str, str], float]:
        """Return (role, method) -> seconds of all its calls that ended since this was last asked, each as in
        `Future.seconds`."""

    def wake(self) -> None:
        """Have `check_interrupt` called now where the loop waits. From any thread."""

    def abort_calls(self) -> None:
        """Have ranks abort the calls in flight where they can, and wait for the end of all."""

    def drain(self) -> None:
        """Wait until every call that was issued has ended. Raises like `Future.result`."""

    def health(self, wait_s: float = 3.0) -> Health:
        """Ask every rank whether it lives and where it is. From any thread."""

    def dead_ranks(self) -> list[int]:
        """Return the ranks that have died, or do not answer within seconds. Quicker than `health`, and for
        one graceful shutdown only. From another thread than the loop's."""

    def where(self) -> str:
        """Say what the loop waits for: "at step 3, waiting for actor.update on rank 1"."""

    def fail(self, error: RuntimeError) -> None:
        """Make this the executor's failure, unless there is one. From any thread."""

    def shutdown(self) -> None:
        """End the ranks after everything that was called. The executor cannot be used afterwards."""

    def kill(self, exit_code: int) -> None:
        """End the ranks at once. The executor cannot be used afterwards."""


class ProcessExecutor(Executor, Protocol):
    """An executor whose ranks are processes, which signals and deaths reach one by one; see shutdown.py."""

    death_first_s: float
    """Seconds for which the failure of a call is kept back, where somebody reports dead ranks to `fail`: the
    death of one is why another raises."""
    is_shutting_down: Callable[[], bool]
    """Asked then: whether the job ends for a reason that is not this failure."""
    on_terminated: Callable[[], None]
    """Called, on another thread, when a rank has got SIGTERM."""


class RoleHandle:
    """Lets a role be called like a local object: `actor.update(x)` is `executor.call("actor", "update",
    x)`."""

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


def at_label(label: str | None) -> str:
    """Return " at step 3" for "step 3", and nothing without a label."""
    return "" if label is None else f" at {label}"
