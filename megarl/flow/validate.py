"""Find all errors of a flow before the job starts.

A flow is the graph of calls of roles that make one training step."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from megarl.flow.columns import base, is_state
from megarl.flow.graph import Graph, Meshes
from megarl.flow.node import Node
from megarl.flow.role import methods_of, role_class, writer_of
from megarl.role_names import kind_and_suffix

Needs = Mapping[tuple[str, str], Sequence[str]]
"""Maps (role, method) to columns that the call needs in this job in addition to its node's columns."""


class FlowError(ValueError):
    """Raised for a flow that cannot run. Each line of `errors` names the node and the column of one error."""

    def __init__(self, errors: Sequence[str]) -> None:
        self.errors = tuple(errors)
        super().__init__("the flow cannot run:\n" + "\n".join(f"  - {line}" for line in errors))


def errors_of(
    graph: Graph, meshes: Meshes | None, needs: Needs | None = None, staleness: int | None = None
) -> list[str]:
    """Return one line per error of a flow, or [] if it can run.

    Args:
        meshes: role -> its mesh, or None if roles may be on any ranks.
        staleness: the --staleness of the job, or None if it is not known."""
    if not graph.nodes:
        return ["flow (empty): it needs at least one node. Start it with actor.rollout()."]
    found = [*_names(graph), *_columns(graph, needs or {}), *_cycles(graph), *_background(graph)]
    found += _staleness(graph, staleness)
    return [*_methods(graph), *([] if meshes is None else _roles(graph, meshes)), *found]


def _methods(graph: Graph) -> Iterable[str]:
    for node in graph.declared:
        if not node.is_known:
            kind = kind_and_suffix(node.role)[0]
            methods = methods_of(role_class(node.role))
            known = [name for name, declared in methods.items() if declared.columns is not None]
            which = (
                f"Known methods of {kind}: {', '.join(sorted(known))}."
                if known
                else f"Nothing is known of role {kind}."
            )
            yield (
                f"node ({node.name}): no columns are known for method "
                f"({node.method}).{_near(node.method, known)} {which} For one of your own, say what it "
                "reads= and writes=, or declare it with @method in its role's class."
            )


def _roles(graph: Graph, meshes: Meshes) -> Iterable[str]:
    placed = f"Placed roles: {', '.join(sorted(meshes))}."
    for node in graph.nodes:
        if node.function is None and node.role not in meshes:
            flag = f"--{node.role.replace('_', '-')}-ranks"
            yield (
                f"node ({node.name}): role ({node.role}) has no mesh.{_near(node.role, meshes)} Place it "
                f"with {flag}, or leave the node out. {placed}"
            )
        for column in filter(is_state, node.reads or ()):
            role = column.split(":", 1)[1]
            if role not in meshes and role != node.role:
                yield (
                    f"node ({node.name}) reads {column}, but role ({role}) has no "
                    f"mesh.{_near(role, meshes)} {placed}"
                )


def _names(graph: Graph) -> Iterable[str]:
    for name, count in Counter(node.name for node in graph.nodes).items():
        if count > 1:
            yield (
                f"node ({name}) is there {count} times: give each a name= of its own, or leave "
                f"{'one' if count == 2 else 'all but one'} out."
            )


def _columns(graph: Graph, needs: Needs) -> Iterable[str]:
    writers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for column in node.writes or ():
            writers.setdefault(column, []).append(node)
    for node in graph.nodes:
        for column in _reads(node, needs):
            if not is_state(column) and not any(writer is not node for writer in writers.get(column, ())):
                itself = " but this node itself" if column in (node.writes or ()) else ""
                writer = writer_of(base(column), graph.rollout_source(node.role))
                add = f" Add {writer}, which does." if writer else _near(column, writers)
                written = ", ".join(sorted(c for c in writers if not is_state(c) and c != column)) or "none"
                yield (
                    f"node ({node.name}) reads {column}, which nobody writes{itself}.{add} "
                    f"Written columns: {written}."
                )
    for column, by in writers.items():
        if len(by) > 1 and not is_state(column):
            names = " and ".join(node.name for node in by)
            yield (
                f"column ({column}) is written by {names}: one node writes it. Give the others a "
                "column of another name (writes=)."
            )


def _reads(node: Node, needs: Needs) -> list[str]:
    """Return the columns that the node reads, and those that its algorithm needs in addition.

    Scores count as rewards."""
    reads = node.reads or ()
    declared = {base(column).replace("scores", "rewards") for column in reads}
    needed = needs.get((node.role, node.method), ())
    return [*reads, *(column for column in needed if column not in declared)]


def _cycles(graph: Graph) -> Iterable[str]:
    waiting: Mapping[str, Mapping[str, tuple[str, ...]]] = {
        name: needs for name, needs in graph.dependencies.items() if name not in graph.depth
    }
    while waiting:
        name = next(iter(waiting))
        chain = [name]
        while True:  # every node without a depth needs another one without a depth
            name = next(need for need in waiting[name] if need in waiting)
            if name in chain:
                break
            chain.append(name)
        cycle = [*chain[chain.index(name) :], name][::-1]
        steps = [
            f"{after} reads "
            f"{', '.join(waiting[after][before]) or 'state that it must not overtake'} of {before}"
            for before, after in pairwise(cycle)
        ]
        yield (
            f"nodes {', '.join(cycle[:-1])} wait for each other: {'; '.join(steps)}. One of them "
            "must read a column of an earlier node."
        )
        waiting = _without(waiting, cycle)


def _without(
    waiting: Mapping[str, Mapping[str, tuple[str, ...]]], cycle: Sequence[str]
) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """Return the nodes that still wait for each other once the nodes of this cycle are taken out."""
    left = {name: needs for name, needs in waiting.items() if name not in cycle}
    while ready := [name for name, needs in left.items() if not needs.keys() & left.keys()]:
        left = {name: needs for name, needs in left.items() if name not in ready}
    return left


def _background(graph: Graph) -> Iterable[str]:
    nodes = {node.name: node for node in graph.nodes}
    for name, needs in graph.dependencies.items():
        for need, columns in needs.items():
            if nodes[need].background and columns and not nodes[name].background:
                yield (
                    f"node ({name}) reads {', '.join(columns)} of {need}, which is a background "
                    "node: the critical path cannot wait for it. "
                    f"Put {need} on the critical path, or {name} into the background too."
                )


def _staleness(graph: Graph, of_job: int | None) -> Iterable[str]:
    for node in graph.nodes:
        given = node.staleness
        if given is None:
            continue
        if not node.samples:
            yield (
                f"node ({node.name}): staleness ({given}) is the age of samples, and this node makes none. "
                f"Write actor.rollout(staleness={given})."
            )
        elif not isinstance(given, int) or given < 0:
            yield (
                f"node ({node.name}): staleness ({given}) must be a whole number, 0 or more. Try staleness=1."
            )
        elif of_job is not None and given != of_job:
            yield (
                f"node ({node.name}): staleness ({given}) must be the job's --staleness ({of_job}), for "
                f"which the sample buffer is made. Leave it out, or start the job with --staleness {given}."
            )


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, [n for n in names if n != name], n=1, cutoff=0.6)
    return f" Did you mean {near[0]}?" if near else ""
