"""One pass over a flow: what has been issued, what has ended, and so what may be issued next. Ranks come into
it as sets only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from megarl.flow import Flow, Node
from megarl.flow.methods import base


@dataclass(frozen=True, slots=True)
class Candidate:
    """What could be issued now: a node, or, if `columns`, the exchange that brings them from `source` to the
    ranks of the node."""

    node: Node
    ranks: frozenset[int]
    source: Node | None = None
    columns: tuple[str, ...] = ()


class PreparedFlow:
    """What does not change from step to step.

    Args:
        meshes: role -> its mesh; only `ranks` is looked at.
        share_of: role -> key of the share of a step's data that it works on.
        driver_columns: names of the columns whose values are in the driver.
    """

    def __init__(
        self,
        flow: Flow,
        meshes: Mapping[str, object],
        share_of: Mapping[str, str],
        driver_columns: Collection[str],
    ):
        flow.validate(meshes)
        self.flow = flow
        self.nodes = {node.name: node for node in flow.nodes}
        index = {name: i for i, name in enumerate(self.nodes)}
        self.order = sorted(
            flow.nodes, key=lambda node: (node.background, -flow.chain_behind[node.name], index[node.name])
        )
        self.path = [node for node in self.order if not node.background]
        self.ranks = {
            n.name: frozenset() if n.function else frozenset(meshes[n.role].ranks) for n in flow.nodes
        }
        self.path_ranks = frozenset().union(*(self.ranks[node.name] for node in self.path))
        self.share_of = share_of
        self.driver_columns = frozenset(driver_columns)
        self.travelling: dict[
            tuple[str, str], tuple[str, ...]
        ] = {}  # (writer, share of the reader) -> columns to bring there
        for node in flow.nodes:
            for need, columns in flow.dependencies[node.name].items():
                if far := self.far(node, self.nodes[need], columns):
                    before = self.travelling.get((need, self.share_of[node.role]), ())
                    self.travelling[need, self.share_of[node.role]] = tuple(dict.fromkeys(before + far))
        names_on_path = {node.name for node in self.path}
        self.awaited = {
            need for name in names_on_path for need, columns in flow.dependencies[name].items() if columns
        }

    def far(self, node: Node, source: Node, columns: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the columns that must be brought to the node's ranks."""
        if node.function or source.function or self.share_of[node.role] == self.share_of[source.role]:
            return ()
        return tuple(column for column in columns if base(column) not in self.driver_columns)

    def needs_value(self, columns: tuple[str, ...]) -> bool:
        """Whether the driver must have seen a value before these can be read."""
        return any(base(column) in self.driver_columns for column in columns)


class FlowStep:
    """One step. The scheduler marks what it issues and what ends; `candidates` says what may come next."""

    def __init__(self, prepared: PreparedFlow, skipped: Collection[str]):
        self.prepared, self.skipped = prepared, frozenset(skipped)
        self.issued: set[str] = set()
        self.ended: set[str] = set()
        self.moved: dict[
            tuple[str, str], bool
        ] = {}  # (writer, share of the reader) -> whether there was an exchange

    def is_over(self) -> bool:
        """Everything on the path is issued, and what others on the path read has ended."""
        return all(n.name in self.issued for n in self.prepared.path) and self.prepared.awaited <= self.ended

    def has_unissued(self) -> bool:
        return len(self.issued) < len(self.prepared.nodes)

    def candidates(self) -> list[Candidate]:
        """In the order in which they are to be issued: exchanges, which let other ranks work; then along the
        longest chain; functions of the driver last, for while one runs nothing can be issued."""
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
                if isinstance(need, Candidate):
                    moves.setdefault((need.source.name, self.prepared.share_of[node.role]), need)
            if all(need is True for need in needs) and node.name not in self.skipped:
                nodes.append(Candidate(node, self.prepared.ranks[node.name]))
        found = [*moves.values(), *nodes]
        return sorted(found, key=lambda c: (c.node.background, c.node.function is not None))

    def _need(self, node: Node, need: str, columns: tuple[str, ...]) -> bool | Candidate:
        """Whether what the node needs of another is, or by the order of calls on its ranks will be, there; or
        what brings it there."""
        prepared, source, ended = self.prepared, self.prepared.nodes[need], need in self.ended
        if need in self.skipped or node.name in self.skipped or node.function or source.function:
            return ended
        if not ended and (need not in self.issued or prepared.needs_value(columns)):
            return False
        key = (need, prepared.share_of[node.role])
        if prepared.far(node, source, columns):
            if key not in self.moved:
                return Candidate(
                    node, prepared.ranks[node.name] | prepared.ranks[need], source, prepared.travelling[key]
                )
            if self.moved[key]:  # that call is on the ranks of both
                return True
        return ended or prepared.ranks[node.name] <= prepared.ranks[need]

    def _pass_over_skipped(self) -> None:
        """A skipped node ends when everything before it has, so that what comes after it still comes after
        that."""
        for name in sorted(self.skipped - self.ended, key=self.prepared.flow.depth.__getitem__):
            if self.prepared.flow.dependencies[name].keys() <= self.ended:
                self.issued.add(name)
                self.ended.add(name)

    def others_want(self, candidate: Candidate) -> bool:
        """Whether a node of the path that does not wait for the candidate has still to be issued on some of
        its ranks."""
        after = {candidate.node.name}
        if candidate.source is not None:  # all that wait for the same exchange
            share = self.prepared.share_of[candidate.node.role]
            needs, share_of = self.prepared.flow.dependencies, self.prepared.share_of
            after |= {
                n.name
                for n in self.prepared.flow.nodes
                if not n.function and share_of[n.role] == share and candidate.source.name in needs[n.name]
            }
        after = after.union(*(self.prepared.flow.behind[name] for name in after))
        return any(
            self._ranks_with_sources(node) & candidate.ranks
            for node in self._unissued_path()
            if node.name not in after
        )

    def path_wants(self, ranks: frozenset[int]) -> bool:
        """Whether something on the path has still to be issued on some of these ranks."""
        return any(self._ranks_with_sources(node) & ranks for node in self._unissued_path())

    def _unissued_path(self) -> Iterator[Node]:
        return (
            node
            for node in self.prepared.path
            if node.name not in self.issued and node.name not in self.skipped
        )

    def _ranks_with_sources(self, node: Node) -> frozenset[int]:
        """Ranks of a node and of the exchanges that it still waits for."""
        prepared = self.prepared
        far = (
            need
            for need, columns in prepared.flow.dependencies[node.name].items()
            if prepared.far(node, prepared.nodes[need], columns)
            and (need, prepared.share_of[node.role]) not in self.moved
        )
        return prepared.ranks[node.name].union(*(prepared.ranks[need] for need in far))
