"""Start the ranks of a job on the nodes of a Ray cluster, and end them.

    this process      the driver: holds the job's store and runs the loop
      |-- RayNode     one actor per node, in a placement group with a bundle per node
      |     |-- rank 0    python -m megarl.train @job.args, as torchrun's agent would start it
      |     `-- rank 1
      `-- RayNode ...

Ray places the actors, gives them CPUs and GPUs, and tells when a node is lost. Calls and results go over the
job's store, as with every executor whose ranks are processes (store_executor.py)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.runtime.job_store import LOOPBACK, job_environment, job_store
from megarl.runtime.node_watch import Node
from megarl.runtime.process import NUM_NODES, store_prefix
from megarl.runtime.rank_processes import RankDied
from megarl.runtime.ray_node import DIRECT_VARIABLES, SIGNALLED, RayNode, node_address

if TYPE_CHECKING:
    from megarl.runtime.store_executor import StoreExecutor

_PLACED_S, _TICK_S, _START_S, _END_S, _KILL_S = 60.0, 1.0, 60.0, 15.0, 2.0
_THREADS_OF_ACTOR = 4  # one waits in next_report, and calls of `end` and `kill` must not wait for it


class RayRanks:
    """Starts and ends the ranks of a job in a Ray cluster: a RayNode actor per node, each with as many ranks.

    The ranks of one node follow each other. Without a cluster a Ray of this machine is started, and ended
    with the job.

    Args:
        argv: arguments of `python -m module` on every rank.
        num_nodes: nodes of the job. Each gives CPUs and, if the cluster has GPUs, a GPU per rank.
        ranks_per_node: ranks of each node.
        address: address of the cluster as in `ray.init`. Default: RAY_ADDRESS, else no cluster.
        describe_rank, tidy_up: as in RankProcesses. `tidy_up` runs on every node, which imports it by name.
        attempt: number of earlier starts of the job."""

    def __init__(
        self,
        argv: Sequence[str],
        num_nodes: int,
        ranks_per_node: int,
        address: str | None = None,
        module: str = "megarl.train",
        describe_rank: Callable[[int], str] = str,
        tidy_up: Callable[[], object] = lambda: None,
        attempt: int = 0,
    ) -> None:
        self._argv, self._module, self._attempt = list(argv), module, attempt
        self._num_nodes, self._ranks_per_node = num_nodes, ranks_per_node
        self._address = address or os.environ.get("RAY_ADDRESS")
        self._describe_rank, self._tidy_up = describe_rank, tidy_up
        self._is_ending, self._has_started_ray = False, False
        self._group: PlacementGroup | None = None
        self._nodes: list[Any] = []  # actor handles of RayNode
        self._names: list[str] = []
        self._lost_nodes: set[int] = set()
        self.on_signal: Callable[[int], bool] = lambda signum: False
        """As in RankProcesses."""

    def start(
        self,
        ranks: dict[str, list[int]],
        call_timeout_s: float,
        interfaces: Mapping[str, type] | None = None,
    ) -> StoreExecutor:
        """Start the ranks, and return the executor that reaches them. A rank or a node that dies sets its
        failure.

        Args:
            ranks: role -> its ranks.
        Raises: RuntimeError, if Ray cannot be reached or has no room; OSError of a node."""
        from megarl.runtime.mailbox import connect
        from megarl.runtime.store_executor import Nodes, StoreExecutor

        if self._group is None:
            self.place([self._num_nodes])
        world_size = self._num_nodes * self._ranks_per_node
        where = self._get([node.where.remote() for node in self._nodes])
        addresses, self._names = [address for address, _ in where], [name for _, name in where]
        own = node_address()
        is_local = set(addresses) == {own}
        self._store = job_store(LOOPBACK if is_local else own)
        env = forwarded() | job_environment(self._store, world_size, self._ranks_per_node, self._attempt)
        env |= {NUM_NODES: str(len({own, *addresses}))}
        starts = [
            node.start.remote(
                self._module,
                self._argv,
                env | {"GROUP_RANK": str(number)},
                self._ranks_of(number),
                os.getcwd(),
                None if is_local else addresses[number],
                self._tidy_up,
            )
            for number, node in enumerate(self._nodes)
        ]
        self._get(starts)
        store = connect(f"{self._store.host}:{self._store.port}", store_prefix(env))
        nodes = None if is_local else Nodes(own, self._num_nodes)
        executor = StoreExecutor(ranks, world_size, call_timeout_s, store, interfaces, nodes)
        if not is_local:
            executor.watch_nodes(self._describe_rank, self._leave_out)
        for number in range(self._num_nodes):
            threading.Thread(
                target=self._watch, args=(number, executor), name=f"watch_node_{number}", daemon=True
            ).start()
        return executor

    def expect_end(self) -> None:
        """Declare that ranks may end from now on: their end is no longer reported as a failure."""
        self._is_ending = True
        for node in self._reachable():
            node.expect_end.remote()

    def end(self, wait_s: float) -> None:
        """Wait `wait_s` seconds for the ranks to exit, then kill those that remain. Gives the nodes back to
        Ray, and ends a Ray that `start` has started."""
        self.expect_end()
        with contextlib.suppress(RayError):  # a node is lost, and its ranks with it
            ends = [node.end.remote(wait_s) for node in self._reachable()]
            ray.wait(ends, num_returns=len(ends), timeout=wait_s + _END_S) if ends else None
        self._release()

    def kill(self) -> None:
        """Kill the ranks and their child processes."""
        self._is_ending = True
        kills = [node.kill.remote() for node in self._reachable()]
        with contextlib.suppress(RayError):
            ray.wait(kills, num_returns=len(kills), timeout=_KILL_S) if kills else None

    def _leave_out(self, node: Node) -> None:
        """Note that a node is lost, so that nothing waits for it at the end."""
        self._lost_nodes.add(node.ranks[0] // self._ranks_per_node)

    def _reachable(self) -> list[Any]:
        return [node for number, node in enumerate(self._nodes) if number not in self._lost_nodes]

    def place(self, counts: Sequence[int]) -> int:
        """Reserve nodes and start their actors. Returns the number of nodes: the first of `counts` that the
        cluster has room for. `start` then uses these nodes.

        Args:
            counts: numbers of nodes to try, each for some time.
        Raises: RuntimeError, if Ray cannot be reached or has no room for any of them."""
        self._has_started_ray = join(self._address, self._num_nodes * self._ranks_per_node)
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        bundle = {"CPU": float(self._ranks_per_node)}
        bundle |= {"GPU": float(self._ranks_per_node)} if has_gpus else {}
        for count in counts:
            strategy = "STRICT_SPREAD" if count > 1 else "STRICT_PACK"
            self._group = placement_group([bundle] * count, strategy=strategy)
            if self._has_room(self._group):
                break
            remove_placement_group(self._group)
        else:
            raise RuntimeError(
                f"Ray has no room for {counts[-1]} x {bundle} on different nodes after "
                f"{len(counts) * _PLACED_S:g} s. Free: {_free()}. Add nodes, or lower --nnodes or --nproc-per-node."
            )
        self._num_nodes = count
        for number in range(count):
            scheduling = PlacementGroupSchedulingStrategy(self._group, number)
            self._nodes.append(
                ray.remote(RayNode)
                .options(
                    num_cpus=bundle["CPU"],
                    num_gpus=bundle.get("GPU", 0.0),
                    max_concurrency=_THREADS_OF_ACTOR,
                    max_restarts=0,
                    max_task_retries=0,
                    scheduling_strategy=scheduling,
                )
                .remote()
            )
        return count

    @staticmethod
    def _has_room(group: PlacementGroup) -> bool:
        """Wait until the cluster has reserved a placement group. Returns False if it does not in time."""
        deadline = time.monotonic() + _PLACED_S
        while not group.wait(_TICK_S):  # returns between waits, so that signals are handled
            if time.monotonic() > deadline:
                return False
        return True

    def _get(self, references: list[Any]) -> list[Any]:
        """Return the results of calls to the nodes. Raises: RuntimeError if a node does not answer; errors of
        its method."""
        deadline = time.monotonic() + _START_S
        while len(ray.wait(references, num_returns=len(references), timeout=_TICK_S)[0]) < len(references):
            if time.monotonic() > deadline:
                raise RuntimeError(f"a node of the Ray cluster did not start its ranks in {_START_S:g} s.")
        try:
            return ray.get(references)
        except RayActorError as error:
            raise RuntimeError(
                f"a node of the Ray cluster was lost before its ranks started: {error}"
            ) from None
        except RayError as error:  # raised by the method
            cause = error.cause if hasattr(error, "cause") else None
            raise (cause if isinstance(cause, OSError) else RuntimeError(str(error))) from None

    def _watch(self, number: int, executor: StoreExecutor) -> None:
        """Report every death on one node, until the job ends. Runs on a thread of its own."""
        node = self._nodes[number]
        while not self._is_ending:
            try:
                report = ray.get(node.next_report.remote())
            except (RayError, RuntimeError):  # RuntimeError: this process has left Ray
                if not self._is_ending:
                    self._lost_nodes.add(number)
                    executor.fail(self._lost(number, executor))
                return
            if report is None or self._is_ending:
                return
            kind, rank, code = report
            if code == 0 and executor.is_ending:
                continue
            if kind == SIGNALLED and self.on_signal(code):
                return
            who = f"of node {self._names[number]}" if rank is None else self._describe_rank(rank)
            executor.fail(RankDied(-code if rank is None else code, who).at(executor.where()))

    def _lost(self, number: int, executor: StoreExecutor) -> RuntimeError:
        ranks = ", ".join(self._describe_rank(rank) for rank in self._ranks_of(number))
        return RuntimeError(
            f"[driver] node {self._names[number]} was lost, with rank {ranks}. The job was {executor.where()}."
        )

    def _ranks_of(self, number: int) -> range:
        first = number * self._ranks_per_node
        return range(first, first + self._ranks_per_node)

    def _release(self) -> None:
        """Give the nodes back to Ray, and leave it."""
        if not ray.is_initialized():
            return
        with contextlib.suppress(RayError):
            for node in self._nodes:
                ray.kill(node)
            if self._group is not None:
                remove_placement_group(self._group)
        self._nodes.clear()
        if self._has_started_ray:
            with own_handlers():
                ray.shutdown()


def join(address: str | None, num_ranks: int = 1) -> bool:
    """Join a Ray cluster, or start a Ray on this machine. Returns False if the user's program has done it.

    Args:
        address: of the cluster, as in `ray.init`. None or "local" starts a Ray here.
        num_ranks: ranks that a Ray on this machine must have room for.
    Raises: RuntimeError, if the cluster cannot be reached."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    how: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True}
    if address in (None, "local"):
        os.environ.setdefault("RAY_worker_niceness", "0")  # 15: ranks would yield to everything else
        how |= dict(address="local", num_cpus=max(os.cpu_count() or 1, num_ranks), include_dashboard=False)
    else:
        with contextlib.suppress(ImportError):  # of another Ray; `ray.init` does it for auto alone
            from ray._private.authentication import authentication_token_setup as tokens

            tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        how |= {"address": address}
    with own_handlers():
        try:
            ray.init(**how)
        except Exception as error:  # Ray raises plain ones, too
            raise RuntimeError(
                f"Ray at {address or 'this machine'} cannot be reached: {str(error).strip()}. "
                "--ray-address takes host:port of the cluster's head, or auto on one of its nodes; "
                "without it and without RAY_ADDRESS a Ray is started here. A cluster with a token needs "
                "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here too."
            ) from None
    return True


@contextlib.contextmanager
def own_handlers() -> Iterator[None]:
    """Keep this process's signal handlers: Ray sets handlers of its own as it starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in found.items():
            signal.signal(signum, handler)


def forwarded() -> dict[str, str]:
    """Return the variables of the driver that the ranks get on every node."""
    return {name: value for name, value in os.environ.items() if name.startswith(DIRECT_VARIABLES)}


def _free() -> str:
    free = ray.available_resources()
    return ", ".join(f"{free.get(name, 0.0):g} {name}" for name in ("CPU", "GPU"))
