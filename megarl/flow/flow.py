"""Write a training step as a graph of calls.

    flow = (actor.rollout().join(reward.score).join(reference.log_probs).join(critic.values)
            .advantages(gae).update(critic).update(actor))

A Flow is a value: every method returns a new Flow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from megarl.flow.columns import base, is_state
from megarl.flow.draw import draw_svg, draw_text
from megarl.flow.graph import Graph, Meshes
from megarl.flow.node import Node, function_node
from megarl.flow.validate import FlowError, Needs, errors_of
from megarl.role_names import kind_and_suffix


class HasAdvantages(Protocol):
    """The part of an algorithm that a flow uses."""

    @property
    def advantage_reads(self) -> Sequence[str]: ...
    @property
    def advantage_writes(self) -> Sequence[str]: ...


class RoleInFlow(Protocol):
    """A role to build a flow with. The role is false if the job does not have it."""

    @property
    def name(self) -> str: ...
    def __bool__(self) -> bool: ...


@runtime_checkable
class MethodInFlow(Protocol):
    """A method of a role to build a flow with. The method is false if the job does not have the role."""

    def node(self, reads: Iterable[str] | None = None, writes: Iterable[str] | None = None) -> Node: ...
    def __bool__(self) -> bool: ...


class Flow(Graph):
    """A graph that can be extended, checked and drawn."""

    def then(
        self, method: MethodInFlow, reads: Iterable[str] | None = None, writes: Iterable[str] | None = None
    ) -> Flow:
        """Add a node. `reads` and `writes` are required if the role's class declares no columns."""
        return self._with(method.node(reads, writes)) if method else self

    def join(self, *methods: MethodInFlow | None) -> Flow:
        """Add nodes that may run at the same time, as far as their columns permit.

        None, and methods of roles that the job does not have, are left out."""
        return self._with(*(method.node() for method in methods if method))

    def advantages(self, algorithm: HasAdvantages, actor: RoleInFlow | None = None) -> Flow:
        """Add the algorithm's advantages, on the actor's ranks.

        A missing `actor.log_probs` is added before the advantages. Scores of reward models count as
        rewards."""
        scored = any(base(column) == "scores" for node in self.nodes for column in node.writes or ())
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

    def update(self, role: RoleInFlow, reads: Iterable[str] | None = None) -> Flow:
        """Add the role's optimizer updates, and after an actor's updates the weight sync of its engines.

        Args:
            reads: columns that the loss reads, or None for those that the role's class declares."""
        if not role:
            return self
        kind, index = kind_and_suffix(role.name)
        nodes = [Node(role=role.name, method="update", reads=None if reads is None else tuple(reads))]
        if kind == "actor" and any(node.role == f"rollout{index}" for node in self.declared):
            nodes.append(Node(role=f"rollout{index}", method="sync"))
        return self._with(*nodes)

    def background(
        self,
        work: MethodInFlow | Callable[..., Any],
        reads: Iterable[str] | None = None,
        writes: Iterable[str] | None = None,
    ) -> Flow:
        """Add work that delays nothing: a method of a role, or a function in a thread of the driver."""
        if not isinstance(work, MethodInFlow):
            return self._with(replace(function_node(work, reads, writes), background=True))
        return self._with(replace(work.node(reads, writes), background=True)) if work else self

    def of_actor(self, index: str) -> Flow:
        """Return the same step for another actor. Every role gets the actor's index, e.g. "_2"."""
        return Flow(_renumbered(node, index) for node in self.declared) if index else self

    def beside(self, *others: Flow) -> Flow:
        """Return one step with the nodes of all flows."""
        return self._with(*(node for other in others for node in other.declared))

    def _with(self, *nodes: Node) -> Flow:
        return Flow((*self.declared, *nodes))

    def errors(self, meshes: Meshes | None = None, needs: Needs | None = None) -> list[str]:
        """Return the errors of the flow, one line per error.

        Args:
            meshes: role -> its mesh. None reports only errors that need no meshes.
            needs: columns that calls need in this job in addition to the columns of their nodes."""
        return errors_of(self, meshes, needs)

    def validate(self, meshes: Meshes | None = None, needs: Needs | None = None) -> None:
        """Raise FlowError if there are errors. The arguments are those of `errors`."""
        if found := self.errors(meshes, needs):
            raise FlowError(found)

    def text(self, meshes: Meshes | None = None) -> str:
        """Return the graph as a table for a terminal."""
        return draw_text(self, meshes)

    def svg(self, meshes: Meshes | None = None) -> str:
        """Return the graph as a picture, with a lane and a colour per mesh (without meshes: per role)."""
        return draw_svg(self, meshes)


def _renumbered(node: Node, index: str) -> Node:
    """Return the node of the actor with this index.

    State that the role's class names belongs to any actor. Other names mean the node's own actor."""

    def columns(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if names is None:
            return None
        return tuple(name + index if is_state(name) and not node.declares(name) else name for name in names)

    name = "" if node.name == f"{node.role}.{node.method}" else node.name + index
    return replace(
        node, role=node.role + index, name=name, reads=columns(node.reads), writes=columns(node.writes)
    )
