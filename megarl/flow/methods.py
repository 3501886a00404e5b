"""What the methods of the roles read and write, as one table, and the names of roles and columns.

    tokens           of the step: tokens, response_mask and rollout_log_probs
    weights:actor    state that outlives the step: who reads it before it is written sees what the last step left
    scores:judge_2   a column of the second of its kind, whose peer writes `scores`

In what a node reads, `values?` means: if somebody writes it; `scores*`: this column of every role that writes
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

F = TypeVar("F", bound=Callable)


class Columns(NamedTuple):
    """What a method needs before it runs, and what is there afterwards."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]


METHODS: dict[tuple[str, str], Columns] = {
    ("rollout", "generate"): Columns(("weights:actor", "weights:rollout"), ("tokens", "lengths")),
    ("rollout", "sync"): Columns(("weights:actor",), ("weights:rollout",)),
    ("reward", "score"): Columns(("tokens",), ("rewards",)),
    ("reward_model", "score"): Columns(("tokens", "lengths"), ("scores",)),
    ("reference", "log_probs"): Columns(("tokens", "lengths"), ("ref_log_probs",)),
    ("critic", "values"): Columns(("tokens", "lengths", "weights:critic"), ("values",)),
    ("critic", "update"): Columns(("tokens", "values", "returns"), ("weights:critic",)),
    ("actor", "log_probs"): Columns(("tokens", "lengths", "weights:actor"), ("old_log_probs",)),
    ("actor", "update"): Columns(
        ("tokens", "old_log_probs", "ref_log_probs?", "advantages"), ("weights:actor",)
    ),
}
"""(kind of role, method) -> its columns. `actor.advantages` is not here: its columns are the algorithm's."""


def columns(reads: Iterable[str] = (), writes: Iterable[str] = ()) -> Callable[[F], F]:
    """Decorator: declare what a method of a role of one's own, or a function of the driver, reads and writes.

    Example:
        class Judge:
            @columns(reads=["tokens", "lengths"], writes=["scores"])
            def score(self): ...
    """

    def declare(function: F) -> F:
        function.flow_columns = Columns(tuple(reads), tuple(writes))
        return function

    return declare


def writer_of(column: str, suffix: str = "") -> str | None:
    """Return the call that writes a column, of a role with this suffix: "reference_2.log_probs". None: not
    known."""
    if column in ("advantages", "returns"):
        return f"actor{suffix}.advantages"
    writers = [f"{kind}{suffix}.{method}" for (kind, method), its in METHODS.items() if column in its.writes]
    return writers[0] if writers else None


def is_state(column: str) -> bool:
    """Whether the column outlives the step."""
    return column.startswith("weights:")


def base(column: str) -> str:
    """`scores` of scores, scores?, scores* and scores:reward_model_2."""
    return column.split(":")[0].rstrip("?*")
