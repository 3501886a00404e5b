"""What depends on what in one step, as a graph: nodes are calls of roles, edges are the columns that they
write and read.

    flow = (actor.rollout().join(reward.score).join(reference.log_probs).join(critic.values)
            .advantages(gae).update(critic).update(actor))

A Flow is a value: every method returns a new one. It knows nothing of ranks, devices or tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from megarl.flow.draw import draw_svg, draw_text
from megarl.flow.methods import METHODS, base, is_state
from megarl.role_names import kind_and_suffix
from megarl.flow.validate import FlowError, Needs, findings

if TYPE_CHECKING:
    from megarl.flow.roles import SymbolicMethod, SymbolicRole

DRIVER = "driver"
"""Role of a node that is a function of the driver's process."""


class HasAdvantages(Protocol):
    """What a flow needs to know of an algorithm."""

    advantage_reads: Sequence[str]
    advantage_writes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Node:
    """One call: a method of a role on all its ranks, or a function in the driver.

    Args:
        reads, writes: columns. None: what METHODS says of this method; if it says nothing, validation does.
        background: nothing on the path waits for it.
        function: called in the driver's process in place of a role's method. The role is then "driver".
        name: default "role.method".
    """

    role: str
    method: str
    reads: tuple[str, ...] | None = None
    writes: tuple[str, ...] | None = None
    background: bool = False
    function: Callable | None = None
    name: str = ""

    def __post_init__(self) -> None:
        known = METHODS.get((kind_and_suffix(self.role)[0], self.method))
        for field, default in (("reads", known and known.reads), ("writes", known and known.writes)):
            value = getattr(self, field)
            object.__setattr__(self, field, default if value is None else tuple(value))
        object.__setattr__(self, "name", self.name or f"{self.role}.{self.method}")

    @property
    def is_known(self) -> bool:
        """Whether its columns are known."""
        return self.reads is not None and self.writes is not None


class Flow:
    """The nodes of a step. Their order counts where columns do not decide: between equals, and for state
    (`weights:...`).

    Args:
        declared: nodes with columns as METHODS and users name them. In `nodes` every column has the name that
            is its own in this flow: two rollouts, actors, critics or reward models do not write the same one.
    """

    def __init__(self, declared: Iterable[Node] = ()) -> None:
        self.declared = tuple(declared)
        self.nodes = _resolve(self.declared)

    # Building.

    def then(
        self, method: SymbolicMethod, reads: Iterable[str] | None = None, writes: Iterable[str] | None = None
    ) -> Flow:
        """One more node. Say what it reads and writes if METHODS does not."""
        return self._with(method.node(reads, writes)) if method else self

    def join(self, *methods: SymbolicMethod | None) -> Flow:
        """More nodes, side by side as far as their columns allow. Skips None and methods of roles that are
        not there."""
        return self._with(*(method.node() for method in methods if method))

    def advantages(self, algorithm: HasAdvantages, actor: SymbolicRole | None = None) -> Flow:
        """The algorithm's advantages, on the actor's ranks, after `actor.log_probs`, which is added if it is
        not there yet.

        Scores of reward models count among the rewards."""
        scored = any(base(column) == "scores" for node in self.nodes for column in node.writes)
        reads = [
            column
            for name in algorithm.advantage_reads
            for column in (("rewards?", "scores*") if name == "rewards" and scored else (name,))
        ]
        role = "actor" if actor is None else actor.name
        log_probs = Node(role=role, method="log_probs")
        added = [] if log_probs.name in (node.name for node in self.declared) else [log_probs]
        return self._with(
            *added,
            Node(
                role=role, method="advantages", reads=tuple(reads), writes=tuple(algorithm.advantage_writes)
            ),
        )

    def update(self, role: SymbolicRole) -> Flow:
        """The role's optimizer updates; after an actor's its engines, if there are any, get the new
        weights."""
        if not role:
            return self
        kind, suffix = kind_and_suffix(role.name)
        nodes = [Node(role=role.name, method="update")]
        if kind == "actor" and any(node.role == f"rollout{suffix}" for node in self.declared):
            nodes.append(Node(role=f"rollout{suffix}", method="sync"))
        return self._with(*nodes)

    def background(
        self,
        work: SymbolicMethod | Callable,
        reads: Iterable[str] | None = None,
        writes: Iterable[str] | None = None,
    ) -> Flow:
        """Work that delays nothing: a method of a role, or a function, which runs in a thread of the
        driver."""
        if hasattr(work, "node"):
            return self._with(replace(work.node(reads, writes), background=True)) if work else self
        return self._with(replace(function_node(work, reads, writes), background=True))

    def of_actor(self, suffix: str) -> Flow:
        """The same step of another actor: every role with its number, "_2"."""
        return Flow(_renumbered(node, suffix) for node in self.declared) if suffix else self

    def beside(self, *others: Flow) -> Flow:
        """One step with the nodes of all."""
        return self._with(*(node for other in others for node in other.declared))

    def lineage(self, role: str) -> str:
        """Suffix of the rollout whose samples the role works on: its own number if there is a rollout with
        it, else ""."""
        suffix = kind_and_suffix(role)[1]
        return suffix if suffix in _lineages(self.declared) else ""

    def _with(self, *nodes: Node) -> Flow:
        return Flow((*self.declared, *nodes))

    # Structure.

    @cached_property
    def dependencies(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Node -> the nodes it comes after -> the columns it reads from them; none where it must merely not
        overtake a reader."""
        needs: dict[str, dict[str, tuple[str, ...]]] = {node.name: {} for node in self.nodes}
        for index, node in enumerate(self.nodes):
            for column in node.reads:
                for writer in self._writers(column, index):
                    needs[node.name][writer.name] = (*needs[node.name].get(writer.name, ()), column)
            for column in filter(is_state, node.writes):
                for earlier in self.nodes[:index]:
                    if column in earlier.reads + earlier.writes:
                        needs[node.name].setdefault(earlier.name, ())
        return needs

    def _writers(self, column: str, index: int) -> list[Node]:
        """Of a state column: its last writer before node `index`. Of any other: who writes it, wherever it
        stands."""
        if is_state(column):
            return [node for node in self.nodes[:index] if column in node.writes][-1:]
        return [node for i, node in enumerate(self.nodes) if column in node.writes and i != index]

    @cached_property
    def depth(self) -> dict[str, int]:
        """Node -> length of the longest chain of nodes before it. Those of a cycle, and all behind it, are
        missing."""
        depth: dict[str, int] = {}
        for _ in self.nodes:
            for name, needs in self.dependencies.items():
                if name not in depth and needs.keys() <= depth.keys():
                    depth[name] = max((depth[need] + 1 for need in needs), default=0)
        return depth

    @cached_property
    def behind(self) -> dict[str, frozenset[str]]:
        """Node -> all nodes that wait for it, directly or not."""
        behind: dict[str, frozenset[str]] = {}
        for name in sorted(self.depth, key=self.depth.__getitem__, reverse=True):
            direct = {
                other for other, needs in self.dependencies.items() if name in needs and other in self.depth
            }
            behind[name] = frozenset(direct).union(*(behind[other] for other in direct))
        return behind

    @cached_property
    def chain_behind(self) -> dict[str, int]:
        """Node -> length of the longest chain of nodes that wait for it."""
        chain: dict[str, int] = {}
        for name in sorted(self.depth, key=self.depth.__getitem__, reverse=True):
            chain[name] = max((chain[other] + 1 for other in self.behind[name]), default=0)
        return chain

    # Judging and showing. `meshes`: role -> its mesh, of which only `ranks` is looked at.

    def findings(self, meshes: Mapping[str, object] | None = None, needs: Needs | None = None) -> list[str]:
        """List what is wrong, a line each.

        Args:
            meshes: None: whatever can be seen without them.
            needs: columns that calls need in this job, whatever their nodes say."""
        return findings(self, meshes, needs)

    def validate(self, meshes: Mapping[str, object] | None = None, needs: Needs | None = None) -> None:
        """Raises: FlowError that lists the findings, if there are any."""
        if found := self.findings(meshes, needs):
            raise FlowError(found)

    def text(self, meshes: Mapping[str, object] | None = None) -> str:
        """The graph for a terminal."""
        return draw_text(self, meshes)

    def svg(self, meshes: Mapping[str, object] | None = None) -> str:
        """The graph as a picture: left to right, a lane and a colour per mesh (without meshes: per role)."""
        return draw_svg(self, meshes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Flow) and self.nodes == other.nodes

    def __hash__(self) -> int:
        return hash(self.nodes)

    def __repr__(self) -> str:
        return f"Flow({' -> '.join(node.name for node in self.nodes)})"


def function_node(function: Callable, reads: Iterable[str] | None, writes: Iterable[str] | None) -> Node:
    """A function of the driver. What it reads and writes: the arguments, else its @columns, else nothing."""
    own = getattr(function, "flow_columns", ((), ()))
    reads, writes = own[0] if reads is None else reads, own[1] if writes is None else writes
    name = function.__name__
    return Node(
        role=DRIVER, method=name, reads=tuple(reads), writes=tuple(writes), function=function, name=name
    )


def _renumbered(node: Node, suffix: str) -> Node:
    known = METHODS.get((kind_and_suffix(node.role)[0], node.method), ((), ()))

    def columns(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """What METHODS says of the first actor's state it means of any; a node's own words mean that of its
        actor."""
        return names and tuple(
            name + suffix if is_state(name) and name not in known[0] + known[1] else name for name in names
        )

    name = "" if node.name == f"{node.role}.{node.method}" else node.name + suffix
    return replace(
        node, role=node.role + suffix, name=name, reads=columns(node.reads), writes=columns(node.writes)
    )


def _lineages(nodes: Iterable[Node]) -> set[str]:
    """Suffixes of the rollouts that sample; those that get new weights only have no samples."""
    kinds = ((*kind_and_suffix(node.role), node.writes or ()) for node in nodes)
    return {suffix for kind, suffix, writes in kinds if kind == "rollout" and not all(map(is_state, writes))}


def _resolve(declared: tuple[Node, ...]) -> tuple[Node, ...]:
    """Give every column the name that is its own in this flow.

    The n-th of a kind writes `column:role` if another of the kind writes `column`. Where there are several
    rollouts, the roles with the suffix of one are its lineage: they read columns of that lineage only, for
    all others are about other samples."""
    lineages = _lineages(declared)
    written: list[tuple[str, str, str]] = []  # (lineage, column as declared, its name in this flow)

    def lineage(node: Node) -> str:
        suffix = kind_and_suffix(node.role)[1]
        return suffix if suffix in lineages else ""

    def written_name(node: Node, column: str) -> str:
        kind, suffix = kind_and_suffix(node.role)
        if is_state(column):
            return state_name(node, column)
        peers = (n for n in declared if n.role != node.role and kind_and_suffix(n.role)[0] == kind)
        return (
            f"{column}:{node.role}"
            if suffix and any(column in (peer.writes or ()) for peer in peers)
            else column
        )

    def state_name(node: Node, column: str) -> str:
        """weights:actor means the actor of the node's own number where METHODS says it."""
        kind, suffix = kind_and_suffix(node.role)
        known = METHODS.get((kind, node.method))
        return column + suffix if known and column in known.reads + known.writes else column

    def read_names(node: Node, column: str) -> list[str]:
        if is_state(column):
            return [state_name(node, column)]
        names = [
            name
            for of, wanted, name in written
            if of == lineage(node) and column.rstrip("?*") in (wanted, name)
        ]
        if column.endswith("*"):
            return names
        suffix = kind_and_suffix(node.role)[1]
        own = [name for name in names if suffix and kind_and_suffix(name)[1] == suffix]
        plain = [name for name in names if name == column.rstrip("?")]
        elsewhere = (
            f":*{lineage(node)}" if any(name == column for _, _, name in written) else ""
        )  # by another lineage
        return (own or plain or names)[:1] or ([] if column.endswith("?") else [column + elsewhere])

    for node in declared:
        written += [(lineage(node), column, written_name(node, column)) for column in node.writes or ()]
    return tuple(
        replace(
            node,
            reads=tuple(
                dict.fromkeys(name for column in node.reads or () for name in read_names(node, column))
            ),
            writes=tuple(written_name(node, column) for column in node.writes or ()),
        )
        for node in declared
    )
