"""The nodes of a flow: calls of roles, and functions of the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from megarl.flow.columns import is_state
from megarl.flow.role import RoleMethod, declaration
from megarl.role_names import kind_and_suffix

DRIVER = "driver"
"""Role name of a node that is a function in the driver's process."""

F = TypeVar("F", bound=Callable[..., Any])


class Columns(NamedTuple):
    """The columns that a function of the driver reads and writes."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]


def columns(reads: Iterable[str] = (), writes: Iterable[str] = ()) -> Callable[[F], F]:
    """Declare which columns a function of the driver reads and writes. Use as a decorator; the function
    itself stays as it is.

    Example:
        @columns(reads=["rewards"])
        def log_table(rewards): ..."""

    def declare(function: F) -> F:
        setattr(function, "flow_columns", Columns(tuple(reads), tuple(writes)))
        return function

    return declare


@dataclass(frozen=True, kw_only=True)
class Node:
    """One call of a flow: a method of a role on all its ranks, or a function in the driver.

    Args:
        reads, writes: columns, or None for those that the role's class declares. If the class declares none,
            the flow is invalid.
        background: whether nothing on the critical path waits for the call.
        staleness: of a rollout that samples: training steps by which the weights that sampled a token may be
            older than those that are trained on it. None means the job's --staleness.
        function: called in the driver's process in place of a role's method. The role is then "driver".
        name: default "role.method"."""

    role: str
    method: str
    reads: tuple[str, ...] | None = None
    writes: tuple[str, ...] | None = None
    background: bool = False
    staleness: int | None = None
    function: Callable[..., Any] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        declared = self._declared_columns()
        for field, default in (("reads", declared and declared[0]), ("writes", declared and declared[1])):
            value = getattr(self, field)
            object.__setattr__(self, field, default if value is None else tuple(value))
        object.__setattr__(self, "name", self.name or f"{self.role}.{self.method}")

    def declaration(self) -> RoleMethod[..., Any] | None:
        """Return what `@method` recorded of the role's method (reads, writes, reports), or None for an
        undeclared method or a driver function."""
        return declaration(self.role, self.method) if self.function is None else None

    def _declared_columns(self) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        declared = self.declaration()
        return None if declared is None else declared.columns

    @property
    def is_known(self) -> bool:
        """Whether it is known which columns the node reads and writes."""
        return self.reads is not None and self.writes is not None

    @property
    def samples(self) -> bool:
        """Whether the node is a rollout that samples, and not one that only receives weights."""
        is_rollout = kind_and_suffix(self.role)[0] == "rollout"
        return is_rollout and not all(map(is_state, self.writes or ()))

    @property
    def index(self) -> str:
        """Index of the role within its kind: "" for the first, "_2" for the second."""
        return kind_and_suffix(self.role)[1]

    def declares(self, column: str) -> bool:
        """Return whether the role's class itself names the column in the `@method` of this call.

        `weights:actor` then means the actor with the role's own index."""
        declared = self._declared_columns()
        return bool(declared and column in declared[0] + declared[1])


def function_node(
    function: Callable[..., Any], reads: Iterable[str] | None, writes: Iterable[str] | None
) -> Node:
    """Return a node that calls a function in the driver's process.

    The node reads and writes the given columns, else those of the function's @columns, else nothing."""
    own = getattr(function, "flow_columns", Columns((), ()))
    return Node(
        role=DRIVER,
        method=function.__name__,
        reads=tuple(own.reads if reads is None else reads),
        writes=tuple(own.writes if writes is None else writes),
        function=function,
        name=function.__name__,
    )


def rollout_sources(nodes: Iterable[Node]) -> set[str]:
    """Return the indices ("", "_2") of the rollouts that sample. A rollout that only receives weights has no
    samples."""
    return {node.index for node in nodes if node.samples}
