"""Run a flow once per step: issue every node as early as possible and keep every rank busy.

ready
    A node is ready when the calls that write its inputs have ended. The calls may also be queued in front of
    the node on each of its ranks, where the node cannot overtake them. The second case requires that the
    driver needs none of the values to make the call.
exchange
    An exchange brings columns between roles that share no mesh. It is one call on the ranks of both roles, in
    front of all readers there.
fair
    A call on several ranks waits on each of them for the last one that becomes free. If the ranks become free
    at different times, the call is held back while something else could still run on one of them. Meanwhile
    at most one call is on any of its ranks, so that its turn comes soon.
order
    The node with the longest chain behind it goes first, then the order of declaration: the same every time.

Background calls run where and when the critical path has nothing left to issue, but for those that must read
weights before the path overwrites them. Background functions run in one thread of this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from megarl.runtime.background import BackgroundThread, DriverCall
from megarl.futures import Future
from megarl.runtime.executor import Executor, at_label
from megarl.trainer.timeline import Record, Timeline
from megarl.flow import DRIVER, Flow, Node
from megarl.flow.graph import Meshes
from megarl.flow.schedule import Candidate, FlowStep, PreparedFlow


class Host(Protocol):
    """The interface of the training job to the scheduler: arguments of calls, transfers of columns, and
    handling of results."""

    @property
    def driver_columns(self) -> Collection[str]:
        """Columns whose values the driver has (without the `:role` of a second role of a kind).

        Their readers are called only after the driver has received the values."""

    def skips(self, node: Node) -> bool:
        """Return whether this node of the flow, a call of a role's method, does not run in this step. Asked for
        every node when the step begins."""

    def arguments(
        self, node: Node, results: Mapping[str, NodeResult]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the positional and the keyword arguments of a node's call when it is issued. `results` has
        every node issued before."""

    def end_of(self, node: Node, call: Future[Any]) -> Future[Any]:
        """Return the future of a node, which may end later than its call on the ranks."""

    def move(self, columns: tuple[str, ...], source_role: str, node: Node) -> Future[Any] | None:
        """Issue the call that brings these columns from the source's ranks to the node's, and return its
        future, or None if there is nothing to do.

        Called once per step for all readers on a mesh. The columns include `weights:...`, for which the
        source may have to act.

        Returns: None if there is nothing to do."""

    def finished(self, node: Node, values: list[Any]) -> None:
        """Handle the end of a node. `values` has one value per rank, or a single value for a function of the
        driver."""


class NodeResult(Future[Any]):
    """Future of one call of a step: of a node or, if `node` is None, of an exchange, which moves columns
    between roles.

    The first reading of the result reports the end of the node to the host."""

    def __init__(
        self,
        scheduler: Scheduler,
        step: FlowStep,
        name: str,
        node: Node | None,
        ranks: frozenset[int],
        future: Future[Any],
        issued: float,
    ) -> None:
        self.step, self.name, self.node, self.ranks = step, name, node, ranks
        self.role = DRIVER if node is None else node.role
        self.future, self.issued, self.label = future, issued, scheduler.executor.label
        self.is_ended = False
        self._scheduler = scheduler

    def result(self) -> list[Any]:
        values = self.future.result()
        self._scheduler.end(self)
        return values

    def done(self) -> bool:
        return self.future.done()


class Scheduler:
    """Runs the flow of each step: issues its calls on the executor as early as possible, and waits for them.

    Args:
        meshes: role -> its mesh; only `ranks` is used.
        shard_key_of: role -> key of its batch shard. Roles with the same key need no exchange. By default
            roles with equal meshes have the same key.
        wait_any: waits until a call is done, or until other calls may be issued. Default: that of the executor.
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
        meshes: Meshes,
        host: Host,
        shard_key_of: Mapping[str, str] | None = None,
        wait_any: Callable[[Sequence[Future[Any]]], list[Future[Any]]] | None = None,
    ) -> None:
        self.timeline = Timeline()
        self.executor, self._meshes, self._host = executor, meshes, host
        self._shard_key_of = shard_key_of or {
            role: next(first for first in meshes if meshes[first] == mesh) for role, mesh in meshes.items()
        }
        self._wait_any = wait_any or executor.wait_any
        self._prepared: PreparedFlow | None = None
        self._running: FlowStep | None = None  # a step until its critical path is over
        self._step: FlowStep | None = None  # the step from then on, for its background nodes
        self._results: dict[str, NodeResult] = {}
        self._in_flight: list[NodeResult] = []
        self._newest: dict[int, NodeResult] = {}  # newest call in flight on each rank
        self._background = BackgroundThread()

    def run(self, flow: Flow, until: Collection[str] | None = None) -> dict[str, NodeResult]:
        """Run one step, or the part of it until the nodes in `until` have ended. Returns the futures of all
        issued nodes by name.

        Other nodes that were ready may have been issued by then. `resume` continues the step.

        Returns: the results of all issued nodes, by name. Nodes without readers may still be running.
        Raises: FlowError before the first call if the flow is wrong. The first error of any rank.
        RuntimeError naming the node if a function of the driver fails, here or in the background since the
        last step."""
        self._end_the_step_before()
        if self._prepared is None or self._prepared.flow is not flow:
            self._prepared = PreparedFlow(flow, self._meshes, self._shard_key_of, self._host.driver_columns)
        self._results = {}
        self._running = FlowStep(self._prepared, {node.name for node in flow.nodes if self._host.skips(node)})
        return self.resume(until)

    def resume(self, until: Collection[str] | None = None) -> dict[str, NodeResult]:
        """Continue the step that `run` began, and return the futures of its issued nodes by name. Without
        this call the next `run` drops the rest of the step.

        Returns and raises like `run`."""
        step = self._running
        assert step is not None
        while until is None or not step.ended.issuperset(until):
            if self._issue_one(step):
                continue
            if until is None and step.is_over():
                self._step, self._running = step, None
                break
            self._wait()
        return self._results

    def close(self) -> None:
        """Wait for all calls in flight, also in the background.

        Call this at the end of a job that did not fail.

        Raises like `run`."""
        self._end_the_step_before()
        while any(call.ranks for call in self._in_flight):
            self._wait()
        self._background.close()
        self._end_functions()

    def _end_the_step_before(self) -> None:
        """Issue the remaining background nodes of the previous step, whatever they wait for.

        The new step will overwrite the columns that they read."""
        self._end_functions()
        for call in [call for call in self._in_flight if call.ranks and call.future.done()]:
            self.end(call)
        step, self._step = self._step, None
        while step is not None and step.has_unissued():
            if not self._issue_one(step, at_any_price=True):
                self._wait()

    def _issue_one(self, step: FlowStep, at_any_price: bool = False) -> bool:
        """Issue the first call whose inputs are there and whose ranks are free. Returns False for none."""
        held_back: set[int] = set()
        for candidate in step.candidates():
            if at_any_price or self._may_issue(candidate, step, held_back):
                self._issue(candidate, step)
                return True
        return False

    def _may_issue(self, candidate: Candidate, step: FlowStep, held_back: set[int]) -> bool:
        """Return whether the candidate may be issued without making its ranks wait needlessly. Adds the ranks
        that it waits for to `held_back`."""
        ranks = candidate.ranks
        in_front = {self._newest.get(rank) for rank in ranks}
        become_free_together = len(in_front) <= 1
        if candidate.node.background:
            others_free = all(rank not in self._newest for rank in ranks - step.prepared.critical_ranks)
            are_free = become_free_together or others_free
            return not ranks or (are_free and not step.critical_path_wants(candidate))
        if become_free_together:
            return in_front <= {None} or not ranks & held_back
        if not step.others_want(candidate):
            return True
        held_back |= ranks
        return False

    def _issue(self, candidate: Candidate, step: FlowStep) -> None:
        node, source, issued, ranks = candidate.node, candidate.source, time.time(), candidate.ranks
        if source is not None:
            moved = self._host.move(candidate.columns, source.role, node)
            step.moved[source.name, step.prepared.shard_of[node.role]] = moved is not None
            if moved is not None:
                name = f"{', '.join(candidate.columns)} to {node.role}"
                self._add(NodeResult(self, step, name, None, ranks, moved, issued))
            return
        args, kwargs = self._host.arguments(node, self._results)
        step.issued.add(node.name)
        future: Future[Any]
        if node.function is None:
            future = self._host.end_of(node, self.executor.call(node.role, node.method, *args, **kwargs))
        elif node.background:
            future = self._background.submit(DriverCall(node.function, *args, **kwargs))
        else:
            future = DriverCall(node.function, *args, **kwargs).run()
        call = self._results[node.name] = NodeResult(self, step, node.name, node, ranks, future, issued)
        self._add(call)
        if node.function is not None and not node.background:
            self.end(call)

    def _add(self, call: NodeResult) -> None:
        self._in_flight.append(call)
        self._newest |= dict.fromkeys(call.ranks, call)

    def _wait(self) -> None:
        """Wait until a call has ended, after which other calls may be issued."""
        if futures := [call.future for call in self._in_flight if call.ranks]:
            done = {id(future) for future in self._wait_any(futures)}
            for call in [call for call in self._in_flight if id(call.future) in done]:
                self.end(call)
        else:
            assert self._in_flight, "nothing is in flight, and yet there is work left"
            function = self._in_flight[0].future
            assert isinstance(function, DriverCall)
            function.wait()
            self._end_functions()

    def _end_functions(self) -> None:
        """Report the results of background functions to the host, or raise their errors."""
        for call in [call for call in self._in_flight if not call.ranks and call.future.done()]:
            self.end(call)

    def end(self, call: NodeResult) -> None:
        """Record a call that has ended in the timeline and report it to the step runner, once. Raises
        RuntimeError if a function of the driver failed."""
        if call.is_ended:
            return
        call.is_ended = True
        self._in_flight.remove(call)
        self._newest = {rank: newest for rank, newest in self._newest.items() if newest is not call}
        node, future, ranks = call.node, call.future, tuple(sorted(call.ranks))
        call.seconds, call.ended = future.seconds, future.ended
        self.timeline.records.append(
            Record(call.name, ranks, call.label, call.issued, call.seconds, call.ended)
        )
        if node is None:
            return
        if isinstance(future, DriverCall) and future.error is not None:
            where = "in the background" if node.background else "on the critical path"
            raise RuntimeError(
                f"[driver] node {call.name}, {where}, failed{at_label(call.label)}: {future.error!r}"
            ) from future.error
        call.step.ended.add(call.name)
        self._host.finished(node, future.result())
