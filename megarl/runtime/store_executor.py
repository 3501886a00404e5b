"""Implement the executor whose ranks are processes: send calls, read replies, enforce deadlines.

Commands and reports travel through a tree of relays (relay.py), questions about the ranks and their answers
over the job's c10d store (mailbox.py)."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megarl.runtime.executor import (
    CallFuture,
    CallTimeout,
    Capabilities,
    Health,
    ProcessExecutor,
    RemoteError,
)
from megarl.runtime.channel import split
from megarl.runtime.job_store import LOOPBACK
from megarl.runtime.key_value_store import KeyValueStore
from megarl.runtime.mailbox import Mailbox, connect
from megarl.runtime.node_watch import LAST_WORDS_S, WATCH_KEY, Node, NodeWatch, node_lost, rank_ended
from megarl.runtime.messages import (
    Call,
    Command,
    Event,
    Failure,
    Kill,
    Reply,
    Report,
    Shutdown,
    Terminated,
    read_report,
    signed_command,
)
from megarl.runtime.process import has_died, process_name, world_size_from_env
from megarl.runtime.relay import DRIVER_ADDRESS, CommandTree, children_of
from megarl.runtime.shutdown_listener import ABORT_CALLS, ALL_RANKS_KNOW, DRIVER, PING, PROCESS
from megarl.runtime.signing import JOB_SECRET, job_secret

_TICK_S = 1.0  # seconds until a process that was not scheduled is taken for a stopped one
_STACKS_S = 3.0  # seconds for ranks to report their stacks
_SOON_S, _PING_S = 0.5, 5.0  # seconds for ranks to answer a ping
_LOCK_S = 1.0


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job with several nodes.

    Args:
        address: IP address of this machine by which the nodes reach it.
        count: number of nodes with ranks."""

    address: str
    count: int


class StoreExecutor(ProcessExecutor):
    """An executor that reaches its ranks through relays, and over the job's c10d store.

    A reader thread takes reports as they come. An error of any rank is therefore known at once, even while
    the driver waits or works.

    Args:
        ranks: role -> its ranks. Every rank of the world needs a role.
        world_size: number of ranks of the job.
        store: a connection to the store; see `mailbox.connect`.
        call_timeout_s, interfaces: as in Executor.
        nodes: None for a job on one node, whose ranks are reached directly."""

    capabilities = Capabilities(
        overlap=True, deadlines=True, rank_processes=True, survives_worker_death=False
    )

    def __init__(
        self,
        ranks: Mapping[str, Sequence[int]],
        world_size: int,
        call_timeout_s: float,
        store: KeyValueStore,
        interfaces: Mapping[str, type] | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        _check_ranks(ranks, world_size)
        super().__init__(ranks, interfaces, call_timeout_s)
        self._stopped_s = 0.0
        self._mailbox, self._nodes = Mailbox(store), nodes
        self._mailbox.set(DRIVER, process_name())
        self._world = range(world_size)
        self._calls: dict[int, tuple[CallFuture, float]] = {}
        """Calls in flight by index, each with the time when it was issued."""
        self._queues: dict[int, deque[int]] = {rank: deque() for rank in self._world}
        """Indices of calls in flight on each rank, oldest first."""
        self._free_since = dict.fromkeys(self._world, 0.0)
        self.is_ending = self._is_over = False
        self._node_watch: NodeWatch | None = None
        self._ending_ranks: set[int] = set()
        self._num_questions = 0
        self._reports: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        num_children = world_size if nodes is None else len(children_of(None, nodes.count))
        address = LOOPBACK if nodes is None else nodes.address
        self._tree = CommandTree(address, num_children, self._reports.put)
        self._reader = threading.Thread(target=self._read, name="read_reports", daemon=True)
        self._reader.start()
        self._mailbox.set(DRIVER_ADDRESS, self._tree.address)

    @classmethod
    def from_env(
        cls,
        ranks: dict[str, list[int]],
        call_timeout_s: float,
        interfaces: Mapping[str, type] | None = None,
        nodes: Nodes | None = None,
    ) -> StoreExecutor:
        """Return an executor for the job whose store `start_driver` has put into the environment. Call this
        in the driver process."""
        job_secret()
        os.environ.pop(JOB_SECRET, None)  # the driver's children do not need the secret
        store = connect(os.environ["MEGARL_STORE"], os.environ["MEGARL_STORE_PREFIX"])
        return cls(ranks, world_size_from_env(), call_timeout_s, store, interfaces, nodes)

    def watch_nodes(
        self,
        describe_rank: Callable[[int], str] = str,
        on_lost: Callable[[Node], object] = lambda node: None,
    ) -> None:
        """Treat a node that is lost from now on, and a rank that ends without a word, as a failure of the job.
        The first rank of every node waits for this call before the ranks join each other.

        Args:
            describe_rank: describes a rank of a lost node, for example "1: actor, critic".
            on_lost: called before the failure is set, on another thread."""

        def report(node: Node, reason: str) -> None:
            on_lost(node)
            self.fail(node_lost(node, reason, describe_rank, self.where()))

        def report_rank(node: Node, rank: int) -> None:
            if not self.is_ending:
                self.fail(rank_ended(node, describe_rank(rank), self.where()))

        def keep_rank(node: Node, rank: int) -> None:
            self._ending_ranks.add(rank)

        assert self._nodes is not None
        self._node_watch = NodeWatch(self._nodes.address, report, report_rank, on_rank_ends=keep_rank)
        self._mailbox.set(WATCH_KEY, self._node_watch.address)

    def _issue(self, call: Call) -> CallFuture:
        return self._post(call, CallFuture(self, call.role, call.method, call.ranks))

    def _post(self, command: Command, future: CallFuture) -> CallFuture:
        with self._changed:
            self._raise_failure()
            self.check_interrupt()
            index = self.num_calls
            # Before it counts: a signal may come while a long command is signed, and the Kill that follows
            # must have the number that the ranks expect.
            message = signed_command(index, command)
            self._calls[index] = future, self._now()
            for rank in future.ranks:
                self._queues[rank].append(index)
            self.num_calls += 1
            self._tree.post(message)
        return future

    def drain(self) -> None:
        self._wait_until(lambda: not self._calls)

    def abort_calls(self) -> None:
        self._mailbox.set(PING, "asked")  # ranks read this key first
        if not self._mailbox.ask_all(ABORT_CALLS, self._world, _PING_S, str(self.num_calls)):
            self._mailbox.set(ALL_RANKS_KNOW, "asked")
        self.drain()

    def health(self, wait_s: float = _STACKS_S) -> Health:
        with self._changed:
            number, self._num_questions = self._num_questions, self._num_questions + 1
        stacks = self._mailbox.ask_health(number, self._world, wait_s)
        return Health(stacks, [rank for rank in self._world if rank not in stacks])

    def shutdown(self) -> None:
        self.is_ending = True
        if not self._is_over:
            # Threads of the ranks that wait for a question are in the store's code, see `_end`.
            self._mailbox.end_health(self._num_questions)
            for key in (PING, ABORT_CALLS, ALL_RANKS_KNOW):
                self._mailbox.set(key, "end")
            self._post(Shutdown(), CallFuture(self, "driver", "shutdown", self._world)).result()
            self._end()

    def kill(self, exit_code: int) -> None:
        self.is_ending = True
        self._tree.post(signed_command(self.num_calls, Kill(exit_code)))
        try:
            self._mailbox.kill()
        finally:
            self._end()

    def dead_ranks(self) -> list[int]:
        missing = self._mailbox.ask_all(PING, self._world, _SOON_S)
        names = self._mailbox.answers(PROCESS, missing)
        dead = [rank for rank, name in names.items() if has_died(name.decode())]
        return dead or self._mailbox.ask_all(PING, missing, _PING_S)

    def where(self) -> str:
        when = super().where()
        if not self._changed.acquire(
            timeout=_LOCK_S
        ):  # a hanging thread may hold the lock, and the caller may be about to end it
            return f"{when}, in the job's store"
        try:
            calls = [
                f"{f.role}.{f.method} on rank {', '.join(map(str, f.missing()))}"
                for f, _ in self._calls.values()
            ]
        finally:
            self._changed.release()
        return f"{when}, waiting for {' and '.join(calls)}" if calls else f"{when}, no call in flight"

    def _end(self) -> None:
        """Close the connections to the ranks and to the nodes, and stop the reader thread."""
        self._is_over = True
        if self._node_watch is not None:
            self._node_watch.close()
        self._tree.close()
        self._reports.put(None)
        self._reader.join(timeout=1.0)

    def _now(self) -> float:
        """Return seconds on a clock that stands while this process is stopped (Ctrl-Z).

        Replies of ranks during that time are not late."""
        return time.monotonic() - self._stopped_s

    def _wait_for_change(self, seconds: float) -> None:
        start = time.monotonic()
        super()._wait_for_change(seconds)
        if (lost := time.monotonic() - start - seconds) > _TICK_S:
            self._stopped_s += lost

    def _seconds_left(self) -> float:
        """Return the seconds until the deadline of a call, inf if none is in flight. Sets a CallTimeout as
        the failure after a missed deadline.

        A rank's clock starts when its oldest call could start there."""
        now = self._now()
        waited = {
            rank: now - max(self._calls[queue[0]][1], self._free_since[rank])
            for rank, queue in self._queues.items()
            if queue
        }
        slowest = max(waited, key=waited.__getitem__, default=None)
        if slowest is None:
            return math.inf
        left = self.call_timeout_s - waited[slowest]
        if left <= 0.0:
            late, _ = self._calls[self._queues[slowest][0]]
            missing, answered = late.missing(), sorted(late.values)
            stacks = self.health().stacks
            self.failure = CallTimeout(
                late.role, late.method, late.label, missing, answered, self.call_timeout_s, stacks
            )
        return left

    # Methods of the reader thread.

    def _read(self) -> None:
        try:
            while (reports := self._reports.get()) is not None:
                for data in split(reports):
                    self._take(read_report(data))
        except Exception as error:  # thread boundary: the main thread would wait for ever
            text = (
                f"[driver] cannot hear the workers any more {self.where()}: {type(error).__name__}: {error}"
            )
            self.fail(RuntimeError(text.splitlines()[0]))

    def _take(self, report: Report) -> None:
        match report:
            case Terminated():
                self.on_terminated()
            case Event():
                self._keep_event(report)
            case Reply(failure=Failure() as failure):
                self._take_failure(report.rank, failure)
            case Reply() if self.failure is None:
                self._take_value(report)

    def _take_failure(self, rank: int, failure: Failure) -> None:
        time.sleep(self.death_first_s)
        deadline = time.monotonic() + LAST_WORDS_S + self.death_first_s
        while self._ending_ranks - {rank} and self.failure is None and time.monotonic() < deadline:
            time.sleep(0.05)  # a rank of another node has died, which is the cause and about to be reported
        if not self.is_shutting_down():
            self.fail(RemoteError(rank, failure))

    def _take_value(self, reply: Reply) -> None:
        with self._changed:
            future, _ = self._calls[reply.index]
            self._queues[reply.rank].popleft()
            self._free_since[reply.rank] = self._now()
            if len(future.values) + 1 == len(future.ranks):
                del self._calls[reply.index]
            try:
                self._keep_value(future, reply)
            except Exception as error:  # including errors of an interface's own types
                failure = Failure(future.role, future.method, future.label, str(error), "")
                self.fail(RemoteError(reply.rank, failure))


def _check_ranks(ranks: Mapping[str, Sequence[int]], world_size: int) -> None:
    placed = {rank for of_role in ranks.values() for rank in of_role}
    if outside := sorted(placed - set(range(world_size))):
        raise ValueError(
            f"roles are placed on ranks {outside}, but the job has {world_size} ranks (0 to "
            f"{world_size - 1}). Start more."
        )
    if idle := sorted(set(range(world_size)) - placed):
        raise ValueError(
            f"no role is placed on ranks {idle} of the {world_size} that were started. Start fewer, "
            "or place a role there."
        )
