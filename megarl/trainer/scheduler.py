"""Runs a flow, once per step: issues every node as soon as it may be, and never makes a rank wait that could
work.

    ready     what a node reads was written by calls that ended; or that are in front of it on each of its own ranks, so that it
              cannot overtake them, if the driver needs none of their values to make the call
    exchange  brings columns between roles that share no mesh; a call on the ranks of both, in front of all
    who read there
    fair      a call on several ranks waits on each of them for the last one that becomes free. Where that differs, it is held back
              while something else could still run on one of them; and meanwhile at most one call is on any of
              its ranks, so that its turn comes soon
    order     the longest chain behind it first, then as declared: the same every time

Background calls go where and when the path has nothing left to issue; functions among them run in one thread
of this process.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from megarl.runtime.background import BackgroundThread, DriverCall
from megarl.runtime.executor import Executor, Future, at_label
from megarl.trainer.timeline import Timeline
from megarl.flow import Flow, Node
from megarl.flow.schedule import Candidate, FlowStep, PreparedFlow


class Host(Protocol):
    """What the nodes mean. All of it is called on the thread that calls `Scheduler.run`."""

    driver_columns: Collection[str]
    """Columns (without the `:role` of a second one of a kind) whose values the driver has. Their readers are
    called when it has them."""

    def skips(self, node: Node) -> bool:
        """Whether the node is left out of this step. Asked once, when the step begins."""

    def arguments(self, node: Node, results: Mapping[str, NodeResult]) -> tuple[tuple, dict]:
        """For the call of a node, when it is issued. `results` has every node that was issued before."""

    def move(self, columns: tuple[str, ...], source_role: str, node: Node) -> Future | None:
        """Issue the call that brings these columns from the source's mesh to the node's; None: there is
        nothing to do.

        Called once per step for all readers on a mesh. `weights:...` are among the columns: for what their
        source must do."""

    def finished(self, node: Node, values: list) -> None:
        """A node ended; `values` as in `Future.result`, of a function of the driver [its value]."""


@dataclass(eq=False, slots=True)
class _Call:
    """A call in flight, of a node or (node None) of an exchange."""

    name: str
    node: Node | None
    ranks: frozenset[int]
    future: Future | DriverCall
    issued: float
    label: str | None
    of: FlowStep
    ended: bool = False


class NodeResult:
    """The future of a node. Reading it tells the host that the node has ended, if nobody has yet."""

    def __init__(self, scheduler: Scheduler, call: _Call):
        self._scheduler, self._call = scheduler, call

    @property
    def role(self) -> str:
        return self._call.node.role

    @property
    def method(self) -> str:
        return self._call.node.method

    @property
    def is_on_path(self) -> bool:
        """A call of a role that the step waits for."""
        return not self._call.node.background and self._call.node.function is None

    @property
    def seconds(self) -> float:
        return self._call.future.seconds

    def result(self) -> list:
        """Values per rank, in the order of the role's ranks. Blocks."""
        values = self._call.future.result()
        self._scheduler._end(self._call)
        return values

    def first(self) -> object:
        return self.result()[0]

    def done(self) -> bool:
        return self._call.future.done()


class Scheduler:
    """Args:
        meshes: role -> its mesh; only `ranks` is looked at.
        shard_key_of: role -> key of its batch shard; roles with the same key need no
            exchange. Default: roles with equal meshes have the same.

    Example:
        scheduler = Scheduler(executor, job.meshes, host)
        for step in job.steps():
            results = scheduler.run(flow)
            metrics = combine(results["actor.update"].result())
        scheduler.close()
    """

    def __init__(
        self,
        executor: Executor,
        meshes: Mapping[str, object],
        host: Host,
        shard_key_of: Mapping[str, str] | None = None,
    ):
        self.timeline = Timeline()
        self._executor, self._meshes, self._host = executor, meshes, host
        self._shard_key_of = shard_key_of or {
            role: next(first for first in meshes if meshes[first] == mesh) for role, mesh in meshes.items()
        }
        self._prepared: PreparedFlow | None = None
        self._running: FlowStep | None = None  # a step until its path is over
        self._step: FlowStep | None = None  # from then on, for what is left in the background
        self._results: dict[str, NodeResult] = {}
        self._in_flight: list[_Call] = []
        self._newest: dict[int, _Call] = {}  # of those in flight on each rank
        self._background = BackgroundThread()

    def run(self, flow: Flow, until: Collection[str] | None = None) -> dict[str, NodeResult]:
        """One step, or its part until these nodes have ended; others that were ready may have been issued by
        then. `resume` goes on.

        Returns the results of all nodes that were issued, by name; those that no other reads may still be
        running.
        Raises: FlowError before the first call if the flow is wrong; the first error of any rank;
        RuntimeError that names the node if a function of the driver fails, here or in the background since
        the last step."""
        self._end_the_step_before()
        if self._prepared is None or self._prepared.flow is not flow:
            self._prepared = PreparedFlow(flow, self._meshes, self._shard_key_of, self._host.driver_columns)
        self._results = {}
        self._running = FlowStep(self._prepared, {node.name for node in flow.nodes if self._host.skips(node)})
        return self.resume(until)

    def resume(self, until: Collection[str] | None = None) -> dict[str, NodeResult]:
        """Go on with a step of which `run` did a part; without this the next `run` drops the rest of it.
        Returns and raises like `run`."""
        step = self._running
        while until is None or not step.ended.issuperset(until):
            if self._issue_one(step):
                continue
            if until is None and step.is_over():
                self._step, self._running = step, None
                break
            self._wait()
        return self._results

    def close(self) -> None:
        """Wait for all that is in flight, in the background too. For the end of a job that did not fail.
        Raises like `run`."""
        self._end_the_step_before()
        while any(call.ranks for call in self._in_flight):
            self._wait()
        self._background.close()
        self._end_functions()

    def _end_the_step_before(self) -> None:
        """Issue what is left of it in the background, whatever that waits for: this step will overwrite what
        it reads."""
        self._end_functions()
        for call in [call for call in self._in_flight if call.ranks and call.future.done()]:
            self._end(call)
        step, self._step = self._step, None
        while step is not None and step.has_unissued():
            if not self._issue_one(step, at_any_price=True):
                self._wait()

    def _issue_one(self, step: FlowStep, at_any_price: bool = False) -> bool:
        """Issue the first candidate that may be. False: there is none."""
        held_back: set[int] = set()
        for candidate in step.candidates():
            if at_any_price or self._may_issue(candidate, step, held_back):
                self._issue(candidate, step)
                return True
        return False

    def _may_issue(self, candidate: Candidate, step: FlowStep, held_back: set[int]) -> bool:
        """Adds to `held_back` the ranks for which the candidate waits."""
        ranks = candidate.ranks
        in_front = {self._newest.get(rank) for rank in ranks}
        become_free_together = len(in_front) <= 1
        if candidate.node.background:
            others_free = all(rank not in self._newest for rank in ranks - step.prepared.critical_ranks)
            return not ranks or (become_free_together or others_free) and not step.critical_path_wants(ranks)
        if become_free_together:
            return in_front <= {None} or not ranks & held_back
        if not step.others_want(candidate):
            return True
        held_back |= ranks
        return False

    def _issue(self, candidate: Candidate, step: FlowStep) -> None:
        node, issued, ranks = candidate.node, time.time(), candidate.ranks
        if candidate.source is not None:
            future = self._host.move(candidate.columns, candidate.source.role, node)
            step.moved[candidate.source.name, step.prepared.shard_of[node.role]] = future is not None
            if future is not None:
                self._add(
                    _Call(
                        f"{', '.join(candidate.columns)} to {node.role}",
                        None,
                        ranks,
                        future,
                        issued,
                        self._executor.label,
                        step,
                    )
                )
            return
        args, kwargs = self._host.arguments(node, self._results)
        step.issued.add(node.name)
        if node.function is None:
            future = self._executor.call(node.role, node.method, *args, **kwargs)
        elif node.background:
            future = self._background.submit(DriverCall(node.function, args, kwargs))
        else:
            future = DriverCall(node.function, args, kwargs).run()
        call = _Call(node.name, node, ranks, future, issued, self._executor.label, step)
        self._results[node.name] = NodeResult(self, call)
        self._add(call)
        if node.function is not None and not node.background:
            self._end(call)

    def _add(self, call: _Call) -> None:
        self._in_flight.append(call)
        self._newest |= dict.fromkeys(call.ranks, call)

    def _wait(self) -> None:
        """Until something ends that may let others be issued."""
        if futures := [call.future for call in self._in_flight if call.ranks]:
            done = {id(future) for future in self._executor.wait_any(futures)}
            for call in [call for call in self._in_flight if id(call.future) in done]:
                self._end(call)
        else:
            assert self._in_flight, "nothing is in flight, and yet there is work left"
            self._in_flight[0].future.wait()
            self._end_functions()

    def _end_functions(self) -> None:
        """Of the background: tell what they returned, or raise what they raised."""
        for call in [call for call in self._in_flight if not call.ranks and call.future.done()]:
            self._end(call)

    def _end(self, call: _Call) -> None:
        if call.ended:
            return
        call.ended = True
        self._in_flight.remove(call)
        self._newest = {rank: newest for rank, newest in self._newest.items() if newest is not call}
        self.timeline.add(
            call.name,
            tuple(sorted(call.ranks)),
            call.label,
            call.issued,
            call.future.seconds,
            call.future.ended,
        )
        if isinstance(call.future, DriverCall) and (error := call.future.error) is not None:
            where = "in the background" if call.node.background else "on the critical path"
            raise RuntimeError(
                f"[driver] node {call.name}, {where}, failed{at_label(call.label)}: {error!r}"
            ) from error
        if call.node is not None:
            call.of.ended.add(call.name)
            self._host.finished(call.node, call.future.result())
