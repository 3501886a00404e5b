"""Write a flow with roles that are only names. Two notations give the same Flow:

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
from collections.abc import Callable, Container, Iterable
from typing import Any

from megarl.flow.columns import base, is_state
from megarl.flow.flow import Flow, HasAdvantages
from megarl.flow.node import Node, function_node
from megarl.role_names import kind_and_suffix


class SymbolicRole:
    """A role that may not exist yet. Its attributes are methods to build a flow with.

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
    """A method of a symbolic role.

    A call starts a Flow. In a @dataflow function a call adds a node."""

    def __init__(self, role: SymbolicRole, method: str) -> None:
        self.role, self.method = role, method

    def __bool__(self) -> bool:
        return bool(self.role)

    def node(self, reads: Iterable[str] | None = None, writes: Iterable[str] | None = None) -> Node:
        """Return a node with the given columns, else those that the role's class declares."""
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
    ) -> Any:
        """Start a Flow with this call, or add the call to the flow of the running @dataflow function.

        Args:
            inputs: values that other calls in the function returned. None represents a role that the job does
                not have."""
        trace = self.role._trace
        if trace is None:
            return Flow().then(self, reads, writes)
        if reads is None and writes is not None and not self.node().is_known:
            reads = [column for traced in inputs if traced for column in traced.columns]
        if not self:
            return Traced(trace, ())
        if algorithm is not None:
            return trace.extend(lambda flow: flow.advantages(algorithm, self.role), inputs)
        if self.method == "update":
            return trace.extend(lambda flow: flow.update(self.role), inputs)
        return trace.extend(lambda flow: flow.then(self, reads, writes), inputs)


class Traced:
    """The result of a call in a @dataflow function, which represents the columns that the call writes."""

    def __init__(self, trace: _Trace, columns: tuple[str, ...]) -> None:
        self.trace, self.columns = trace, columns


class _Trace:
    """The flow of a @dataflow function while the function runs."""

    def __init__(self) -> None:
        self.flow = Flow()

    def extend(self, build: Callable[[Flow], Flow], inputs: Iterable[Traced | None]) -> Traced:
        """Add the nodes that `build` adds. Raises ValueError for an input that no added node reads."""
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
    """Add work that delays nothing to a @dataflow function.

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
    """Turn a function of roles into a builder of its Flow.

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
