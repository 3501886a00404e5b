"""Write a training step as a graph of calls, with roles that are only names.

A Flow is a value: every method returns a new Flow. Two notations give the same Flow:

actor, critic, reference, reward = symbolic_roles("actor critic reference reward", present=meshes)
flow = (actor.rollout().join(reward.score).join(reference.log_probs).join(critic.values)
        .advantages(gae).update(critic).update(actor))

@dataflow
def ppo(actor, critic, reference, reward):
    samples = actor.rollout()
    scores = reward.score(samples)
    ref_log_probs = reference.log_probs(samples)
    values = critic.values(samples)
    advantages = actor.advantages(scores, ref_log_probs, values, algorithm=gae)
    critic.update(advantages)
    return actor.update(advantages)

flow = ppo(present=meshes)"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from megarl.flow.columns import base, is_state
from megarl.flow.draw import draw_svg, draw_text
from megarl.flow.graph import Graph, Meshes
from megarl.flow.node import Node, function_node
from megarl.flow.validate import FlowError, Needs, errors_of
from megarl.role_names import kind_and_suffix


class HasAdvantages(Protocol):
    """The attributes of an algorithm that a flow uses: the columns that its advantages read and write."""

    @property
    def advantage_reads(self) -> Sequence[str]: ...
    @property
    def advantage_writes(self) -> Sequence[str]: ...


class Flow(Graph):
    """A training step as a graph of calls that can be extended, checked and drawn. Methods that add nodes
    return a new Flow."""

    def then(
        self,
        method: SymbolicMethod,
        reads: Iterable[str] | None = None,
        writes: Iterable[str] | None = None,
        staleness: int | None = None,
    ) -> Flow:
        """Return the flow with one more node. `reads` and `writes` are required if the role's class declares
        no columns."""
        return self._with(replace(method.node(reads, writes), staleness=staleness)) if method else self

    def join(self, *methods: SymbolicMethod | None) -> Flow:
        """Return the flow with more nodes, which may run at the same time as far as their columns permit.

        None, and methods of roles that the job does not have, are left out."""
        return self._with(*(method.node() for method in methods if method))

    def advantages(self, algorithm: HasAdvantages, actor: SymbolicRole | None = None) -> Flow:
        """Return the flow with a node that computes the algorithm's advantages on the actor's ranks.

        A missing `actor.log_probs` is added before the advantages, unless `actor.scores` is in its place or the
        algorithm does without (`takes_engine_log_probs`). Scores of reward models count as
        rewards."""
        scored = any(base(column) == "scores" for node in self.nodes for column in node.writes or ())
        reads = [
            column
            for name in algorithm.advantage_reads
            for column in (("rewards?", "scores*") if name == "rewards" and scored else (name,))
        ]
        role = "actor" if actor is None else actor.name
        log_probs = Node(role=role, method="log_probs")
        is_there = {log_probs.name, f"{role}.scores"} & {node.name for node in self.declared}
        added = [] if is_there or getattr(algorithm, "takes_engine_log_probs", False) else [log_probs]
        return self._with(
            *added,
            Node(
                role=role, method="advantages", reads=tuple(reads), writes=tuple(algorithm.advantage_writes)
            ),
        )

    def update(
        self,
        role: SymbolicRole,
        reads: Iterable[str] | None = None,
        writes: Iterable[str] | None = None,
    ) -> Flow:
        """Return the flow with the role's optimizer updates and, after an actor's updates, the weight sync of
        its engines.

        Args:
            reads, writes: columns of the update, or None for those that the role's class declares."""
        if not role:
            return self
        kind, index = kind_and_suffix(role.name)
        nodes = [SymbolicMethod(role, "update").node(reads, writes)]
        if kind == "actor" and any(node.role == f"rollout{index}" for node in self.declared):
            nodes.append(Node(role=f"rollout{index}", method="sync"))
        return self._with(*nodes)

    def background(
        self,
        work: SymbolicMethod | Callable[..., Any],
        reads: Iterable[str] | None = None,
        writes: Iterable[str] | None = None,
    ) -> Flow:
        """Return the flow with work that delays no other node: a method of a role, or a function in a thread
        of the driver."""
        if not isinstance(work, SymbolicMethod):
            return self._with(replace(function_node(work, reads, writes), background=True))
        return self._with(replace(work.node(reads, writes), background=True)) if work else self

    def with_staleness(self, staleness: int) -> Flow:
        """Return the same flow in which each rollout that names no staleness has this one."""
        return Flow(
            replace(node, staleness=staleness) if node.samples and node.staleness is None else node
            for node in self.declared
        )

    def of_actor(self, index: str) -> Flow:
        """Return the same flow for another actor: every role name gets the actor's index, e.g. "_2"."""
        return Flow(_renumbered(node, index) for node in self.declared) if index else self

    def beside(self, *others: Flow) -> Flow:
        """Return one flow with the nodes of this flow and of the others."""
        return self._with(*(node for other in others for node in other.declared))

    def _with(self, *nodes: Node) -> Flow:
        return Flow((*self.declared, *nodes))

    def errors(
        self, meshes: Meshes | None = None, needs: Needs | None = None, staleness: int | None = None
    ) -> list[str]:
        """Return the errors of the flow, one line per error, or [] if it can run.

        Args:
            meshes: role -> its mesh. None reports only errors that need no meshes.
            needs: columns that calls need in this job in addition to the columns of their nodes.
            staleness: the --staleness of the job, which rollouts must not contradict; None if unknown."""
        return errors_of(self, meshes, needs, staleness)

    def validate(
        self, meshes: Meshes | None = None, needs: Needs | None = None, staleness: int | None = None
    ) -> None:
        """Raise FlowError with all errors of the flow, if there are any. The arguments are those of
        `errors`."""
        if found := self.errors(meshes, needs, staleness):
            raise FlowError(found)

    def text(self, meshes: Meshes | None = None) -> str:
        """Return the graph as a table for a terminal."""
        return draw_text(self, meshes)

    def svg(self, meshes: Meshes | None = None) -> str:
        """Return the graph as a picture, with a lane and a colour per mesh (without meshes: per role)."""
        return draw_svg(self, meshes)


def _renumbered(node: Node, index: str) -> Node:
    """Return a copy of the node for the actor with this index: "critic.update" and "_2" give
    "critic_2.update".

    State that the role's class names belongs to any actor. Other names mean the node's own actor."""

    def columns(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if names is None:
            return None
        return tuple(name + index if is_state(name) and not node.declares(name) else name for name in names)

    name = "" if node.name == f"{node.role}.{node.method}" else node.name + index
    return replace(
        node, role=node.role + index, name=name, reads=columns(node.reads), writes=columns(node.writes)
    )


class SymbolicRole:
    """Stands for a role while a flow is written, before the job exists. Its attributes are methods to build
    the flow with.

    Args:
        name: "actor", "critic_2", ...
        present: whether the job has the role. If not, the object is false, and a flow leaves out its
            nodes."""

    def __init__(self, name: str, present: bool = True, trace: _Trace | None = None) -> None:
        self.name, self._present, self._trace = name, present, trace

    def __bool__(self) -> bool:
        return self._present

    def __getattr__(self, method: str) -> SymbolicMethod:
        if method.startswith("_"):
            raise AttributeError(f"{method} of role {self.name} is private: no flow can call it.")
        kind, index = kind_and_suffix(self.name)
        if (kind, method) == ("actor", "rollout"):
            return SymbolicMethod(SymbolicRole(f"rollout{index}", self._present, self._trace), "generate")
        return SymbolicMethod(self, method)

    def __repr__(self) -> str:
        return f"SymbolicRole({self.name}{'' if self else ', absent'})"


class SymbolicMethod:
    """A method of a symbolic role. Calling it starts a flow, or adds a node to one, and runs nothing.

    A call starts a Flow. In a @dataflow function a call adds a node."""

    def __init__(self, role: SymbolicRole, method: str) -> None:
        self.role, self.method = role, method

    def __bool__(self) -> bool:
        return bool(self.role)

    def node(self, reads: Iterable[str] | None = None, writes: Iterable[str] | None = None) -> Node:
        """Return a node for a call of the method, with the given columns, else those that the role's class
        declares."""
        return Node(
            role=self.role.name,
            method=self.method,
            reads=None if reads is None else tuple(reads),
            writes=None if writes is None else tuple(writes),
        )

    def __call__(
        self,
        *inputs: Traced | None,
        reads: Iterable[str] | None = None,
        writes: Iterable[str] | None = None,
        algorithm: HasAdvantages | None = None,
        staleness: int | None = None,
    ) -> Any:
        """Return a new Flow with this call. In a @dataflow function, add the call to the function's flow and
        return a Traced.

        Args:
            inputs: values that other calls in the function returned. None represents a role that the job does
                not have.
            staleness: of `actor.rollout`: training steps by which the weights that sampled a token may be
                older than those that are trained on it. Default: the job's --staleness."""
        trace = self.role._trace
        if trace is None:
            return Flow().then(self, reads, writes, staleness)
        if reads is None and writes is not None and not self.node().is_known:
            reads = [column for traced in inputs if traced for column in traced.columns]
        if not self:
            return Traced(trace, ())
        if algorithm is not None:
            return trace.extend(lambda flow: flow.advantages(algorithm, self.role), inputs)
        if self.method == "update":
            return trace.extend(lambda flow: flow.update(self.role, reads, writes), inputs)
        return trace.extend(lambda flow: flow.then(self, reads, writes, staleness), inputs)


class Traced:
    """The result of a call in a @dataflow function, which represents the columns that the call writes."""

    def __init__(self, trace: _Trace, columns: tuple[str, ...]) -> None:
        self.trace, self.columns = trace, columns


class _Trace:
    """The flow that a running @dataflow function has built so far."""

    def __init__(self) -> None:
        self.flow = Flow()

    def extend(self, build: Callable[[Flow], Flow], inputs: Iterable[Traced | None]) -> Traced:
        """Add the nodes that `build` adds, and return the columns that they write. Raises ValueError for an
        input that no added node reads."""
        longer = build(self.flow)
        added = longer.declared[len(self.flow.declared) :]
        reads = [column for node in added for column in node.reads or ()]
        wanted = {column if is_state(column) else base(column) for column in reads}
        for given in inputs:
            if (
                given
                and given.columns
                and all(node.is_known for node in added)
                and not wanted & {*given.columns}
            ):
                raise ValueError(
                    f"node ({added[-1].name}) is given {', '.join(given.columns)}, which it does not read. "
                    f"It reads {', '.join(reads) or 'nothing'}."
                )
        self.flow = longer
        return Traced(self, tuple(column for new in added for column in new.writes or ()))


def background(
    work: SymbolicMethod | Callable[..., Any],
    *inputs: Traced,
    reads: Iterable[str] | None = None,
    writes: Iterable[str] | None = None,
) -> Traced:
    """Add work that delays no other node to the flow of the running @dataflow function. Returns the columns
    that it writes, as a Traced.

    The work reads the columns that it declares, else the columns of its inputs."""
    traces = [given.trace for given in inputs if given]
    if isinstance(work, SymbolicMethod) and work.role._trace is not None:
        traces.append(work.role._trace)
    if not traces:
        raise ValueError(
            f"background({getattr(work, '__name__', work)}) needs an input to know its flow: pass "
            "what another call returned."
        )
    declared = (
        work.node(reads, writes) if isinstance(work, SymbolicMethod) else function_node(work, reads, writes)
    )
    if reads is None and not declared.reads:
        reads = [column for given in inputs if given for column in given.columns]
    if writes is None and declared.writes is None:
        writes = ()
    return (
        traces[0].extend(lambda flow: flow.background(work, reads, writes), inputs)
        if work
        else Traced(traces[0], ())
    )


def dataflow(function: Callable[..., object]) -> Callable[..., Flow]:
    """Turn a function of roles into a function `build(present)` that returns the Flow of its calls. Use as a
    decorator.

    Call the builder with `present=meshes`, or without arguments if the job has all roles.

    Parameters without a default are roles, called by their names. The function runs once per build, with
    symbolic roles."""

    def build(present: Container[str] | None = None) -> Flow:
        trace = _Trace()
        names = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        function(*(SymbolicRole(name, present is None or name in present, trace) for name in names))
        return trace.flow

    build.__name__, build.__doc__ = function.__name__, function.__doc__
    return build


def symbolic_roles(names: str, present: Container[str] | None = None) -> list[SymbolicRole]:
    """Return symbolic roles for the names, which are separated by blanks.

    A flow leaves out roles that are not in `present`. None means that the job has all roles."""
    return [SymbolicRole(name, present is None or name in present) for name in names.split()]
