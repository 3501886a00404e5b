"""Hold the nodes of a step and the dependencies between them, without ranks, devices or tensors.

Edges are the columns that nodes write and read. A graph has no ranks, devices or tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

from megarl.flow.columns import is_state
from megarl.flow.node import Node, rollout_sources
from megarl.role_names import kind_and_suffix


class HasRanks(Protocol):
    """The attribute of a role's mesh that a flow uses: its global ranks."""

    @property
    def ranks(self) -> Sequence[int]: ...


Meshes = Mapping[str, HasRanks]
"""Maps each role to its mesh."""


class Graph:
    """The nodes of a step, which are calls, with an edge from the writer of each column to its readers.

    The order of the nodes matters where columns do not decide: between equal nodes, and for state.

    Args:
        declared: nodes with columns as roles and users name them. In `nodes` every column has a name that is
            unique in this flow: two rollouts, actors, critics or reward models do not write the same
            column."""

    def __init__(self, declared: Iterable[Node] = ()) -> None:
        self.declared = tuple(declared)
        self.nodes = _resolve(self.declared)

    def rollout_source(self, role: str) -> str:
        """Return the index ("", "_2") of the rollout whose samples the role works on.

        The result is the role's own index if a rollout with this index samples, else ""."""
        index = kind_and_suffix(role)[1]
        return index if index in rollout_sources(self.declared) else ""

    @cached_property
    def dependencies(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Node -> the nodes that it waits for -> the columns that it reads from each.

        The columns are () where a node only must not overtake a reader of the state that it writes."""
        needs: dict[str, dict[str, tuple[str, ...]]] = {node.name: {} for node in self.nodes}
        for index, node in enumerate(self.nodes):
            for column in node.reads or ():
                for writer in self._writers(column, index):
                    needs[node.name][writer.name] = (*needs[node.name].get(writer.name, ()), column)
            for column in filter(is_state, node.writes or ()):
                for earlier in self.nodes[:index]:
                    if column in (*(earlier.reads or ()), *(earlier.writes or ())):
                        needs[node.name].setdefault(earlier.name, ())
        return needs

    def _writers(self, column: str, index: int) -> list[Node]:
        """Return all nodes that write a column; of weights, only the last writer before node `index`."""
        if is_state(column):
            return [node for node in self.nodes[:index] if column in (node.writes or ())][-1:]
        return [node for i, node in enumerate(self.nodes) if column in (node.writes or ()) and i != index]

    @cached_property
    def depth(self) -> dict[str, int]:
        """Node -> the length of the longest chain of nodes that must end before it; 0 for a node that waits
        for none.

        The nodes of a cycle, and all nodes behind a cycle, are missing."""
        depth: dict[str, int] = {}
        for _ in self.nodes:
            for name, needs in self.dependencies.items():
                if name not in depth and needs.keys() <= depth.keys():
                    depth[name] = max((depth[need] + 1 for need in needs), default=0)
        return depth

    @cached_property
    def stale_edges(self) -> list[tuple[str, str, int]]:
        """Edges from one step to later ones, as (writer of weights, rollout, staleness).

        The rollout samples for a step with weights that the writer left up to `staleness` steps earlier. Only
        rollouts with a staleness above 0 have such an edge."""
        edges = []
        for node in self.nodes:
            read = {*filter(is_state, node.reads or ())}
            writers = [other.name for other in self.nodes if read & {*(other.writes or ())}]
            if node.staleness and writers:
                edges.append((writers[-1], node.name, node.staleness))
        return edges

    @cached_property
    def behind(self) -> dict[str, frozenset[str]]:
        """Node -> the names of all nodes that wait for it, directly or not."""
        behind: dict[str, frozenset[str]] = {}
        for name in sorted(self.depth, key=self.depth.__getitem__, reverse=True):
            direct = {
                other for other, needs in self.dependencies.items() if name in needs and other in self.depth
            }
            behind[name] = frozenset(direct).union(*(behind[other] for other in direct))
        return behind

    @cached_property
    def chain_behind(self) -> dict[str, int]:
        """Node -> the length of the longest chain of nodes that wait for it."""
        chain: dict[str, int] = {}
        for name in sorted(self.depth, key=self.depth.__getitem__, reverse=True):
            chain[name] = max((chain[other] + 1 for other in self.behind[name]), default=0)
        return chain

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self.nodes == other.nodes

    def __hash__(self) -> int:
        return hash(self.nodes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({' -> '.join(node.name for node in self.nodes)})"


def _resolve(declared: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the nodes with column names that are unique in this flow: a second critic's `values` becomes
    `values:critic_2`."""
    names = _Names(declared)
    resolved = []
    for node in declared:
        names.add_written_by(node)
    for node in declared:
        reads = dict.fromkeys(name for column in node.reads or () for name in names.read(node, column))
        writes = tuple(names.written(node, column) for column in node.writes or ())
        resolved.append(replace(node, reads=tuple(reads), writes=writes))
    return tuple(resolved)


class _Names:
    """Gives the columns of one flow unique names, if several roles of a kind write the same column.

    The n-th role of a kind writes `column:role` if another role of the kind writes `column`. If several
    rollouts sample, a role with the index of one rollout reads only columns of that rollout's samples."""

    def __init__(self, declared: tuple[Node, ...]) -> None:
        self._declared, self._sources = declared, rollout_sources(declared)
        self._written: list[tuple[str, str, str]] = []
        """Tuples (rollout source, column as declared, its name in this flow)."""

    def add_written_by(self, node: Node) -> None:
        for column in node.writes or ():
            self._written.append((self._source(node), column, self.written(node, column)))

    def written(self, node: Node, column: str) -> str:
        """Return the unique name of a column that the node writes under this name."""
        kind, index = kind_and_suffix(node.role)
        if is_state(column):
            return self._state(node, column)
        if not index:
            return column
        peers = (n for n in self._declared if n.role != node.role and kind_and_suffix(n.role)[0] == kind)
        return f"{column}:{node.role}" if any(column in (peer.writes or ()) for peer in peers) else column

    def read(self, node: Node, column: str) -> list[str]:
        """Return the unique names of the columns that the node reads by this name: several for `scores*`,
        none for an optional one that nobody writes."""
        if is_state(column):
            return [self._state(node, column)]
        source, bare = self._source(node), column.rstrip("?*")
        names = [name for of, wanted, name in self._written if of == source and bare in (wanted, name)]
        if column.endswith("*"):
            return names
        own = [name for name in names if node.index and kind_and_suffix(name)[1] == node.index]
        plain = [name for name in names if name == column.rstrip("?")]
        if chosen := own or plain or names:
            return chosen[:1]
        if column.endswith("?"):
            return []
        has_other_source = any(name == column for _, _, name in self._written)
        return [f"{column}:*{source}" if has_other_source else column]

    def _source(self, node: Node) -> str:
        return node.index if node.index in self._sources else ""

    def _state(self, node: Node, column: str) -> str:
        """Return the name of the weights that a node reads or writes, with the actor's index:
        "weights:actor_2".

        If the role's class names it, weights:actor means the actor with the node's own index."""
        return column + node.index if node.declares(column) else column
