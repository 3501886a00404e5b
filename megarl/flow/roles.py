"""Roles by name only, to write a flow with. Two ways that give the same Flow:

actor, critic, reference, reward = symbolic_roles("actor critic reference reward", present=meshes)
flow = (actor.rollout().join(reward.score).join(reference.log_probs).join(critic.values)
        .advantages(gae).update(critic).update(actor))

@dataflow
def ppo(actor, critic, reference, reward):
    samples = actor.rollout()
    scores, ref_log_probs, values = reward.score(samples), reference.log_probs(samples),
    critic.values(samples) advantages = actor.advantages(scores, ref_log_probs, values, algorithm=gae)
    critic.update(advantages) return actor.update(advantages)

flow = ppo(present=meshes)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable

from megarl.flow.graph import Flow, HasAdvantages, Node, function_node
from megarl.flow.methods import METHODS, base, is_state
from megarl.role_names import kind_and_suffix


class SymbolicRole:
    """A role that may not exist yet: its attributes are methods to build a flow of.

    Args:
        name: "actor", "critic_2", ...
        present: False: not in this job. It is false, and whatever is built with it is left out.
        cls: class of a role of one's own; its methods declare their columns with @columns.
    """

    def __init__(self, name: str, present: bool = True, cls: type | None = None, trace: _Trace | None = None):
        self.name, self._present, self._cls, self._trace = name, present, cls, trace

    def __bool__(self) -> bool:
        return self._present

    def __getattr__(self, method: str) -> SymbolicMethod:
        if method.startswith("_"):
            raise AttributeError(f"{method} of role {self.name} is private: no flow can call it.")
        kind, suffix = kind_and_suffix(self.name)
        if (kind, method) == ("actor", "rollout"):
            return SymbolicMethod(
                SymbolicRole(f"rollout{suffix}", self._present, None, self._trace), "generate"
            )
        return SymbolicMethod(self, method)

    def __repr__(self) -> str:
        return f"SymbolicRole({self.name}{'' if self else ', absent'})"


class SymbolicMethod:
    """A method of a symbolic role. In a @dataflow function a call of it is a node; elsewhere a call starts a
    Flow."""

    def __init__(self, role: SymbolicRole, method: str):
        self.role, self.method = role, method

    def __bool__(self) -> bool:
        return bool(self.role)

    def node(self, reads: Iterable[str] | None = None, writes: Iterable[str] | None = None) -> Node:
        """With the columns given, else those of the class of the role, else those of METHODS."""
        own = getattr(getattr(self.role._cls, self.method, None), "flow_columns", (None, None))
        return Node(
            role=self.role.name,
            method=self.method,
            reads=own[0] if reads is None else reads,
            writes=own[1] if writes is None else writes,
        )

    def __call__(
        self,
        *inputs: Traced | None,
        reads: Iterable[str] | None = None,
        writes: Iterable[str] | None = None,
        algorithm: HasAdvantages | None = None,
    ) -> Flow | Traced:
        """Args: inputs: what other calls in the function returned. None is a role that is not there."""
        trace = self.role._trace
        if trace is None:
            return Flow().then(self, reads, writes)
        if (
            reads is None
            and (kind_and_suffix(self.role.name)[0], self.method) not in METHODS
            and writes is not None
        ):
            reads = [column for traced in inputs if traced for column in traced.columns]
        if not self:
            return Traced(trace, ())
        if algorithm is not None:
            return trace.extend(lambda flow: flow.advantages(algorithm, self.role), inputs)
        if self.method == "update":
            return trace.extend(lambda flow: flow.update(self.role), inputs)
        return trace.extend(lambda flow: flow.then(self, reads, writes), inputs)


class Traced:
    """What a call in a @dataflow function stands for: the columns that it writes."""

    def __init__(self, trace: _Trace, columns: tuple[str, ...]):
        self.trace, self.columns = trace, columns


class _Trace:
    """The flow of a @dataflow function as it is being run."""

    def __init__(self) -> None:
        self.flow = Flow()

    def extend(self, build: Callable[[Flow], Flow], inputs: Iterable[Traced | None]) -> Traced:
        """Add what `build` adds. Raises ValueError if none of it reads what it is given."""
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
    work: SymbolicMethod | Callable,
    *inputs: Traced,
    reads: Iterable[str] | None = None,
    writes: Iterable[str] | None = None,
) -> Traced:
    """In a @dataflow function: work that delays nothing. It reads what it declares, else the columns of its
    inputs."""
    traces = [given.trace for given in inputs if given] + (
        [work.role._trace] if isinstance(work, SymbolicMethod) else []
    )
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


def dataflow(function: Callable) -> Callable[..., Flow]:
    """Turn a function of roles into a builder of its Flow: `function(present=meshes)`, or `function()` with
    all roles there.

    Parameters without a default are roles, called by their names. The function runs once per build, with
    symbolic roles."""

    def build(present: Container[str] | None = None) -> Flow:
        trace = _Trace()
        names = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        function(*(SymbolicRole(name, present is None or name in present, None, trace) for name in names))
        return trace.flow

    build.__name__, build.__doc__ = function.__name__, function.__doc__
    return build


def symbolic_roles(names: str, present: Container[str] | None = None) -> list[SymbolicRole]:
    """The roles of these names, separated by blanks; those not in `present` (None: all are) are left out of
    what is built with them."""
    return [SymbolicRole(name, present is None or name in present) for name in names.split()]
