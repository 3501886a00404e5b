"""Define the protocol between a driver and its ranks.

Code above this module does not know which executor runs. No executor knows what a role or a step is.

    updated = actor.update(step)         a future, returned at once
    metrics = updated.result()           one value per rank of the role, in the order of its ranks

create
    A factory makes an executor over its ranks; `ranks` and `capabilities` describe the executor.
call
    call, call_on, role: calls on disjoint ranks overlap; calls on one rank run in the order issued.
wait
    Future.result, wait_any, wait_event: `check_interrupt` can end each of them.
events
    take_events, wait_event: reports that ranks send outside of results.
abort
    abort_calls: calls in flight end early where they can; their values are not used.
drain
    drain: wait for every call that was issued.
health
    health: which ranks answer, and the stack of each of them.
shut down
    shutdown: the ranks end after all issued calls.
kill
    kill: the ranks end at once.

Arguments, results and events are messages of declared types (messages.py). tests/runtime/executor_contract.py
tests all of this for any executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megarl.runtime.messages import Event


@dataclass(frozen=True)
class Capabilities:
    """Features of an executor beyond running calls in their order."""

    overlap: bool
    """Whether calls on disjoint ranks run at the same time.

    Otherwise a call has ended when `call` returns."""
    deadlines: bool
    """Whether a call longer than `call_timeout_s` raises a CallTimeout that shows where the ranks are."""
    rank_processes: bool
    """Whether ranks are separate processes.

    The death of a rank process is then a failure, and no rank process is left after the shutdown."""
    survives_worker_death: bool
    """Whether the other ranks can be called after one has died."""


@dataclass(frozen=True)
class Health:
    """Ranks that answer and ranks that are silent."""

    stacks: dict[int, str]
    """Stack of the main thread of each rank that has answered."""
    silent: list[int] = field(default_factory=list)
    """Ranks that have not answered: dead, stopped, or in native code that holds the GIL."""


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
        ranks: ranks that did not answer.
        stacks: Python stack of each rank that has reported one; None if the ranks were not asked."""

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
    """The pending result of a call."""

    role: str
    """Name of the role that was called."""
    seconds: float
    """Seconds of the call on its slowest rank, without earlier calls. 0 until done."""
    ended: float
    """`time.time()` when the last rank had finished. 0 until done."""

    def result(self) -> list:
        """Return the values per rank, in the order of the role's ranks. Blocks.

        Raises: the first error of the job, whichever call it came from."""

    def first(self) -> object:
        """Return the value of the role's first rank. Waits for all ranks."""

    def done(self) -> bool:
        """Return whether `result` would return at once. Raises like `result`."""


class Executor(Protocol):
    """Runs methods of roles on their ranks."""

    capabilities: Capabilities
    ranks: dict[str, list[int]]
    """Ranks of each role."""
    label: str | None
    """Label of the calls, set by the loop, for example "step 3". Errors name it."""
    check_interrupt: Callable[[], None]
    """Function set by the loop; an exception from it interrupts the loop.

    The executor calls it on the loop's thread before a call is issued and while the loop waits."""
    failure: RuntimeError | None
    """The first failure of any rank. From then on calls and waits raise it."""
    call_timeout_s: float | None
    """Seconds that a rank may take for one call, from when the rank is free to start it.

    None: no deadlines."""

    @property
    def num_calls(self) -> int:
        """Number of issued calls."""

    def call(self, role: str, method: str, /, *args: object, **kwargs: object) -> Future:
        """Call a method on all ranks of the role. Raises: CannotSend that names role, method and argument."""

    def call_on(
        self, ranks: Sequence[int], role: str, method: str, /, *args: object, **kwargs: object
    ) -> Future:
        """Call only these ranks of the role. `result` returns their values in the order of `ranks`."""

    def role(self, name: str) -> RoleHandle:
        """Return the role as an object with methods. Raises: ValueError if there is no such role."""

    def wait_any(self, futures: Sequence[Future], or_event: bool = False) -> list[Future]:
        """Block until at least one future is done. Returns the futures that are done.

        Args:
            or_event: return also when an event waits to be taken, possibly without a finished future.
        Raises: like `Future.result`; ValueError for no futures."""

    def wait_event(self, timeout_s: float | None = None) -> Event | None:
        """Block until there is an event, and take the oldest. Returns None after the timeout.

        Raises: like `Future.result`."""

    def take_events(self) -> list[Event]:
        """Take all events that have arrived, in their order on each rank. Does not block."""

    def take_seconds(self) -> dict[tuple[str, str], float]:
        """Return (role, method) -> seconds of all its calls that ended since the last call of this method.

        Each call counts as in `Future.seconds`."""

    def wake(self) -> None:
        """Call `check_interrupt` now if the loop waits. From any thread."""

    def abort_calls(self) -> None:
        """Ask the ranks to abort the calls in flight where they can, and wait for the end of all calls."""

    def drain(self) -> None:
        """Wait until every issued call has ended. Raises like `Future.result`."""

    def health(self, wait_s: float = 3.0) -> Health:
        """Ask every rank for a sign of life and its stack. From any thread."""

    def dead_ranks(self) -> list[int]:
        """Return the ranks that have died or do not answer within seconds.

        This is quicker than `health`. Call it once per graceful shutdown, from another thread than the
        loop's."""

    def where(self) -> str:
        """Describe what the loop waits for: "at step 3, waiting for actor.update on rank 1"."""

    def fail(self, error: RuntimeError) -> None:
        """Set the executor's failure unless there is one already. From any thread."""

    def shutdown(self) -> None:
        """End the ranks after all issued calls. The executor cannot be used afterwards."""

    def kill(self, exit_code: int) -> None:
        """End the ranks at once. The executor cannot be used afterwards."""


class ProcessExecutor(Executor, Protocol):
    """An executor whose ranks are processes, which receive signals and die individually; see shutdown.py."""

    death_first_s: float
    """Seconds to delay the failure of a call, where dead ranks are reported to `fail`.

    The death of one rank makes calls on others raise, and the death should be reported first."""
    is_shutting_down: Callable[[], bool]
    """Function called after this delay. Returns whether the job ends for a reason other than this failure."""
    on_terminated: Callable[[], None]
    """Function called, on another thread, when a rank has received SIGTERM."""


class RoleHandle:
    """Lets a role be called like a local object.

    `actor.update(x)` is `executor.call("actor", "update", x)`."""

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
    """Raise ValueError unless these are distinct ranks of the role."""
    check_role(ranks, role)
    if not subset or len(set(subset)) < len(subset) or not set(subset) <= set(ranks[role]):
        raise ValueError(
            f"ranks ({list(subset)}) must be some of those of role {role} ({ranks[role]}), each "
            f"once. Try {ranks[role][:1]}."
        )


def check_some(futures: Sequence[Future]) -> None:
    """Raise ValueError if there is no future to wait for."""
    if not futures:
        raise ValueError("wait_any needs at least one future: it would wait for ever.")


def at_label(label: str | None) -> str:
    """Return " at step 3" for "step 3", and nothing without a label."""
    return "" if label is None else f" at {label}"
