"""Decide which calls of a flow may be issued now, from the calls that were issued and those that ended.

The scheduler of the driver issues the calls and waits for them. In this module ranks are sets of numbers, and
nothing is called."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from megarl.flow.columns import base
from megarl.flow.flow import Flow
from megarl.flow.graph import Meshes
from megarl.flow.node import Node


@dataclass(frozen=True, slots=True)
class Candidate:
    """A call that may be issued now: of a node, or of an exchange, which moves columns to the node's ranks.

    An exchange has `columns`, and moves them from `source` to the ranks of the node."""

    node: Node
    ranks: frozenset[int]
    source: Node | None = None
    columns: tuple[str, ...] = ()


class PreparedFlow:
    """A valid flow with its order of nodes, their ranks and the columns to move, which stay the same from
    step to step.

    Args:
        meshes: role -> its mesh.
        shard_of: role -> key of the batch shard that it works on.
        driver_columns: names of the columns whose values are in the driver.
    Raises: FlowError if the flow cannot run."""

    def __init__(
        self,
        flow: Flow,
        meshes: Meshes,
        shard_of: Mapping[str, str],
        driver_columns: Collection[str],
    ) -> None:
        flow.validate(meshes)
        self.flow = flow
        self.nodes = {node.name: node for node in flow.nodes}
        index = {name: i for i, name in enumerate(self.nodes)}
        self.order = sorted(
            flow.nodes, key=lambda node: (node.background, -flow.chain_behind[node.name], index[node.name])
        )
        self.critical = [node for node in self.order if not node.background]
        """The nodes of the critical path, which the step waits for."""
        self.ranks: dict[str, frozenset[int]] = {
            n.name: frozenset() if n.function else frozenset(meshes[n.role].ranks) for n in flow.nodes
        }
        self.critical_ranks: frozenset[int] = frozenset().union(
            *(self.ranks[node.name] for node in self.critical)
        )
        self.shard_of = shard_of
        self.driver_columns = frozenset(driver_columns)
        self.travelling: dict[tuple[str, str], tuple[str, ...]] = {}
        """Maps (writer, batch shard of the reader) to the columns that must be moved there."""
        for node in flow.nodes:
            for need, columns in flow.dependencies[node.name].items():
                if far := self.far(node, self.nodes[need], columns):
                    before = self.travelling.get((need, self.shard_of[node.role]), ())
                    self.travelling[need, self.shard_of[node.role]] = tuple(dict.fromkeys(before + far))
        self.awaited = {
            need
            for node in self.critical
            for need, columns in flow.dependencies[node.name].items()
            if columns
        }
        """Nodes whose columns the critical path reads."""

    def far(self, node: Node, source: Node, columns: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of the columns that must be moved from the ranks of `source` to the node's; () if both
        use the same ranks."""
        if node.function or source.function or self.shard_of[node.role] == self.shard_of[source.role]:
            return ()
        return tuple(column for column in columns if base(column) not in self.driver_columns)

    def needs_value(self, columns: tuple[str, ...]) -> bool:
        """Return whether the driver must receive a value before these columns can be read."""
        return any(base(column) in self.driver_columns for column in columns)


class FlowStep:
    """The progress of one step through its flow: which calls were issued and which have ended.

    The scheduler marks calls as issued and as ended. `candidates` returns the calls that may come next."""

    def __init__(self, prepared: PreparedFlow, skipped: Collection[str]) -> None:
        self.prepared, self.skipped = prepared, frozenset(skipped)
        self.issued: set[str] = set()
        self.ended: set[str] = set()
        self.moved: dict[tuple[str, str], bool] = {}
        """Maps (writer, batch shard of the reader) to whether an exchange took place."""

    def is_over(self) -> bool:
        """Return whether all nodes that are not in the background are issued, and those whose columns are
        read have ended."""
        issued = all(node.name in self.issued for node in self.prepared.critical)
        return issued and self.prepared.awaited <= self.ended

    def has_unissued(self) -> bool:
        """Return whether a node has not been issued yet."""
        return len(self.issued) < len(self.prepared.nodes)

    def candidates(self) -> list[Candidate]:
        """Return the calls that may be issued now, in the order to issue them.

        Exchanges come first, because they let other ranks work. Nodes follow, those with the longest chain
        behind them first. Functions of the driver come last, because nothing can be issued while one runs."""
        self._pass_over_skipped()
        moves: dict[tuple[str, str], Candidate] = {}
        nodes = []
        for node in self.prepared.order:
            if node.name in self.issued:
                continue
            needs = [
                self._need(node, need, columns)
                for need, columns in self.prepared.flow.dependencies[node.name].items()
            ]
            for need in needs:
                if isinstance(need, Candidate) and need.source is not None:
                    moves.setdefault((need.source.name, self.prepared.shard_of[node.role]), need)
            if all(need is True for need in needs) and node.name not in self.skipped:
                nodes.append(Candidate(node, self.prepared.ranks[node.name]))
        found = [*moves.values(), *nodes]
        return sorted(found, key=lambda c: (c.node.background, c.node.function is not None))

    def _need(self, node: Node, need: str, columns: tuple[str, ...]) -> bool | Candidate:
        """Return whether a node can read these columns of the node `need`, or the exchange that must be
        called first.

        It can if the columns exist, or will exist by the order of calls on its ranks. If only an exchange is
        missing, return the exchange."""
        prepared, source, ended = self.prepared, self.prepared.nodes[need], need in self.ended
        if need in self.skipped or node.name in self.skipped or node.function or source.function:
            return ended
        if not ended and (need not in self.issued or prepared.needs_value(columns)):
            return False
        key = (need, prepared.shard_of[node.role])
        if prepared.far(node, source, columns):
            if key not in self.moved:
                return Candidate(
                    node, prepared.ranks[node.name] | prepared.ranks[need], source, prepared.travelling[key]
                )
            if self.moved[key]:  # the exchange is on the ranks of both nodes
                return True
        return ended or prepared.ranks[node.name] <= prepared.ranks[need]

    def _pass_over_skipped(self) -> None:
        """Mark each skipped node as ended when all nodes before it have ended.

        Nodes behind a skipped node thereby keep their order."""
        for name in sorted(self.skipped - self.ended, key=self.prepared.flow.depth.__getitem__):
            if self.prepared.flow.dependencies[name].keys() <= self.ended:
                self.issued.add(name)
                self.ended.add(name)

    def others_want(self, candidate: Candidate) -> bool:
        """Return whether another node that is not in the background must still be issued on some of the
        candidate's ranks.

        Nodes that wait for the candidate do not count."""
        after = self._after(candidate)
        return any(
            self._ranks_with_sources(node) & candidate.ranks
            for node in self._unissued(background=False)
            if node.name not in after
        )

    def critical_path_wants(self, candidate: Candidate) -> bool:
        """Return whether a call in the background must leave its ranks to the critical path, of which a node
        must still be issued on some of them.

        The critical path waits for a background node that reads weights which it overwrites. Such a node
        leaves its ranks only to nodes that wait for no background node. The others cannot come first."""
        unissued, behind = [*self._unissued(background=False)], self.prepared.flow.behind
        if self._after(candidate) & {node.name for node in unissued}:
            waiting = frozenset().union(*(behind[node.name] for node in self._unissued(background=True)))
            unissued = [node for node in unissued if node.name not in waiting]
        return any(self._ranks_with_sources(node) & candidate.ranks for node in unissued)

    def _after(self, candidate: Candidate) -> frozenset[str]:
        """Return the candidate's node, or all that wait for the same exchange, and the nodes behind them."""
        first = {candidate.node.name}
        if candidate.source is not None:  # all nodes that wait for the same exchange
            shard_of, needs = self.prepared.shard_of, self.prepared.flow.dependencies
            shard = shard_of[candidate.node.role]
            for node in self.prepared.flow.nodes:
                if node.function or shard_of[node.role] != shard:
                    continue
                if candidate.source.name in needs[node.name]:
                    first.add(node.name)
        return frozenset(first).union(*(self.prepared.flow.behind[name] for name in first))

    def _unissued(self, background: bool) -> Iterator[Node]:
        """Return the nodes, of the background or of the critical path, that must still be issued."""
        done = self.issued | self.skipped
        return (n for n in self.prepared.order if n.background == background and n.name not in done)

    def _ranks_with_sources(self, node: Node) -> frozenset[int]:
        """Return the ranks of a node and those of the nodes whose columns must still be moved to it."""
        prepared = self.prepared
        far = (
            need
            for need, columns in prepared.flow.dependencies[node.name].items()
            if prepared.far(node, prepared.nodes[need], columns)
            and (need, prepared.shard_of[node.role]) not in self.moved
        )
        return prepared.ranks[node.name].union(*(prepared.ranks[need] for need in far))
