"""Sync weights from training ranks (sources) to engine ranks (destinations): a version reaches all engines or
none.

    source        exports its weights once; per version it announces "complete" and sends digests, or the
                  error for which it cannot
    destination   waits for its sources, copies and compares digests
    all ranks     vote; the lowest rank counts the votes and writes the verdict
    destination   commits: the version generates and the prefix cache is empty.
                  Or gives up: all ranks raise the same SyncError

No destination commits before all have the version, and no source changes its weights before. The error names
a rank that is late or dead when the deadline is over. No rank waits longer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from megarl.config.hf_config import ModelShape
from megarl.config.schema import ReshardConfig
from megarl.failures import ExplainedError
from megarl.ranges import profiled
from megarl.reshard.atlas import Atlas
from megarl.reshard.destination import Arrival
from megarl.reshard.digest import Digest
from megarl.reshard.engine_atlas import engine_atlases
from megarl.reshard.key_value_store import KeyValueStore, Late
from megarl.reshard.plan import RectCopy, ReshardPlan, make_plan
from megarl.reshard.receiver import Pull, Receiver
from megarl.reshard.transfer import Transfer, src_view
from megarl.reshard.transports.choose import Place, choose, place_here, ranks_per_node
from megarl.reshard.transports.exported import Exported, export

logger = logging.getLogger(__name__)
T = TypeVar("T")
PULLED = ("shared-memory", "cuda-ipc")
_GRACE_S = 3.0  # lets the first rank's error arrive before others give up waiting for the verdict


class SyncError(ExplainedError, RuntimeError):
    """Error of a version of the weights that did not arrive. The message names the rank and the tensor, or
    another cause."""

    read_on = "docs/debugging.md, section Read a failure"


@dataclass(frozen=True)
class Participant:
    """The facts about a rank that other ranks need before the first weight sync: its machine and device, and
    the dtypes of its engine's weights."""

    place: Place
    engine_place: Place | None
    """Place of the engine that the rank speaks for, if any."""
    dtypes: dict[int, dict[str, str]]
    """Destination rank of that engine -> name of a weight -> torch.<dtype>.

    Sources compute digests of their weights after the conversion to these dtypes."""


class WeightSync:
    """One rank's part in all weight syncs from training ranks (sources) to engine ranks (destinations) that
    follow one plan.

    Every rank that holds a source or speaks for a destination has a WeightSync, made from the same plan.

    Args:
        plan: from `make_plan`; its destinations are rollout ranks.
        rank: this process.
        speakers: destination rank -> the rank whose process drives that destination's engine.
        sources: this rank's source tensors by the names of its atlas; {} if the rank is no source.
        receiver: this rank's engine, if it speaks for one.
        generation: counts the plans that this set of ranks has had.
        actor: suffix of the actor whose weights these are. Syncs of several actors may run on the same ranks.

    `begin` and `finish` are collective over `participants`. Between them an engine with two buffers continues
    to generate with the old weights. Between two versions source tensors may move in memory, with their
    storages."""

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        speakers: dict[int, int],
        sources: dict[str, Tensor],
        receiver: Receiver | None,
        options: ReshardConfig,
        generation: int = 0,
        actor: str = "",
    ) -> None:
        self.plan, self.rank, self.options = plan, rank, options
        self._speakers, self._sources, self._receiver = speakers, sources, receiver
        self.participants = sorted({source for source, _ in plan.copies} | set(speakers.values()))
        self._store = KeyValueStore(f"{generation}{actor}", alone=len(self.participants) == 1)
        self._sends = {dst: copies for (src, dst), copies in plan.copies.items() if src == rank}
        self._receives = {
            (src, dst): copies
            for (src, dst), copies in plan.copies.items()
            if speakers[dst] == rank and receiver
        }
        self._place = place_here(rank, next(iter(sources.values())).device.type if sources else "cpu")
        self._round, self._deadline, self._problem = 0, 0.0, None
        self._transports: dict[tuple[int, int], str] | None = None
        self._store.write(f"place/{rank}", Participant(self._place, self._engine_place(), self._dtypes()))

    # ------------------------------------------------------------------ once

    def _engine_place(self) -> Place | None:
        return self._receiver and place_here(self.rank, self._receiver.device, self._receiver.process)

    def _dtypes(self) -> dict[int, dict[str, str]]:
        return {
            dst: {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in of_dst.items()}
            for dst, of_dst in (self._receiver.tensors if self._receiver else {}).items()
        }

    def _connect(self) -> None:
        """Choose the transports.

        Raises: SyncError on all ranks if no allowed transport works for some pair."""
        self._version, self._deadline = None, time.monotonic() + self.options.reshard_timeout_s
        transports, problem = {}, None
        try:
            places = self._read_places()
            transports = self._choose(places)
        except (SyncError, ValueError) as error:
            problem = _described(self.rank, None, error)
        # Without the vote ranks with a transport would wait for ranks without one.
        if (verdict := self._vote(problem)) is not None:
            raise SyncError(verdict)
        self._transports = transports
        self._dtypes_of = {
            dst: {
                name: getattr(torch, dtype) for name, dtype in places[self._speakers[dst]].dtypes[dst].items()
            }
            for dst in self._sends
        }
        self._exported, self._messages = None, None
        self._addresses: list[int] | None = None  # of the source tensors, once they are exported
        self._announced: dict[int, Exported] = {}  # what each destination knows of
        self._new_pulls: dict[int, dict[int, Pull]] = {}

    def _find_sources(self) -> None:
        """Export the weights, build their digests and lay out the messages, once and again after an offload
        has moved them."""
        if self._addresses == [tensor.data_ptr() for tensor in self._sources.values()]:
            return
        if any(self._transports[self.rank, dst] in PULLED for dst in self._sends):
            self._exported = export(self._sources)  # moves CPU storages, so before any address is taken
        self._digests = {
            dst: Digest(
                [src_view(copy, self._sources) for copy in copies],
                [self._dtypes_of[dst][copy.dst_name] for copy in copies],
                torch.get_num_threads(),
            )
            for dst, copies in self._sends.items()
        }
        for dst in self._sends:
            if self._transports[self.rank, dst] == "direct":
                self._new_pulls.setdefault(dst, {})[self.rank] = (self._sources, None)
        if self._messages is None:
            self._messages = self._plan_messages()
        else:
            self._messages.follow()
        self._addresses = [tensor.data_ptr() for tensor in self._sources.values()]

    def _read_places(self) -> dict[int, Participant]:
        """Return the Participant of this rank and of each of its peers."""
        peers = (
            {self._speakers[dst] for dst in self._sends} | {src for src, _ in self._receives} | {self.rank}
        )
        return {peer: self._read(f"place/{peer}", Participant, peer, "connect") for peer in sorted(peers)}

    def _choose(self, places: dict[int, Participant]) -> dict[tuple[int, int], str]:
        """Return (source, destination) -> transport for each pair of this rank, and log the choices once.
        Raises ValueError if a wanted transport cannot work."""
        transports, pairs_by = {}, {}
        for src, dst in dict.fromkeys([*((self.rank, dst) for dst in self._sends), *self._receives]):
            transport, why = choose(
                places[src].place, places[self._speakers[dst]].engine_place, self.options.reshard_transport
            )
            transports[src, dst] = transport
            pairs_by.setdefault((transport, why), []).append(f"{src}->{dst}")
        for (transport, why), pairs in pairs_by.items():
            logger.info("[rank %d] weights %s: %s (%s)", self.rank, ", ".join(pairs), transport, why)
        return transports

    def _plan_messages(self) -> Transfer | None:
        """Return the messages that this rank sends and receives over torch.distributed, or None if there are
        none.

        An engine in another process cannot receive messages. This process receives them, exports the result,
        and the engine pulls it."""
        pairs = [pair for pair, transport in self._transports.items() if transport == "messages"]
        if not pairs:
            return None
        copies: dict[tuple[int, int], list[RectCopy]] = {}
        for src, dst in sorted(pairs):
            copies.setdefault((src, self._speakers[dst]), []).extend(
                replace(copy, dst_name=f"{dst}/{copy.dst_name}") for copy in self.plan.copies[src, dst]
            )
        incoming = [(src, dst) for src, dst in pairs if self._receiver and dst in self._receiver.tensors]
        tensors = {
            f"{dst}/{name}": tensor
            for dst in {dst for _, dst in incoming}
            for name, tensor in self._receiver.tensors[dst].items()
        }
        if tensors and self._receiver.process is not None:
            tensors = {
                name: torch.zeros(t.shape, dtype=t.dtype, device=self._receiver.device)
                for name, t in tensors.items()
            }
            there = export(tensors)
            for src, dst in incoming:
                self._new_pulls.setdefault(dst, {})[src] = (
                    there,
                    tuple(
                        replace(
                            copy,
                            src_name=f"{dst}/{copy.dst_name}",
                            src_row=copy.dst_row,
                            src_col=copy.dst_col,
                        )
                        for copy in self.plan.copies[src, dst]
                    ),
                )
        plan = ReshardPlan({pair: tuple(of_pair) for pair, of_pair in copies.items()})
        dtypes = {
            f"{dst}/{name}": dtype
            for dst, of_dst in self._dtypes_of.items()
            for name, dtype in of_dst.items()
        }
        return Transfer(plan, self.rank, self._sources, tensors, dtypes)

    # ------------------------------------------------------------------ every version

    @profiled("sync/begin")
    def begin(self, version: int) -> None:
        """Announce this rank's weights as complete for `version`, and start to copy the others' weights.
        Raises SyncError if the ranks cannot connect; `finish` raises the errors of the copies."""
        if self._transports is None:
            self._connect()
        self._round += 1
        self._version, self._problem = version, None
        self._deadline = time.monotonic() + self.options.reshard_timeout_s
        try:
            self._announce(version)
            in_engine = self._receiver is not None and self._receiver.process is None
            if not in_engine:
                self._run_messages()
                if self._receiver is not None and self._receiver.device == "cuda":
                    torch.cuda.synchronize()  # the engine's process does not see the stream that they fill
            if self._receiver is not None:
                messages = self._run_messages if in_engine else lambda: None
                self._receiver.begin(version, self._await_sources(version), self._new_pulls, messages)
                self._new_pulls = {}
        except Exception as error:  # the vote reports the error to all ranks, and finish raises it
            self._problem = _described(self.rank, version, error)
            self._announce_problem()

    @profiled("sync/finish")
    def finish(self) -> None:
        """Wait until every engine has the version and commit it, or raise the same SyncError on all ranks.

        Raises: SyncError, the same on all ranks, if a destination does not have the version."""
        problem = self._problem
        if problem is None and self._receiver is not None:
            try:
                problem = self._receiver.verify(max(self._deadline - time.monotonic(), 0.1))
            except Exception as error:  # as in begin
                problem = _described(self.rank, self._version, error)
        verdict = self._vote(problem)
        self._store.end_sync()
        if verdict is not None:
            if self._receiver is not None:
                self._receiver.give_up()
            raise SyncError(verdict)
        if self._receiver is not None:
            self._receiver.commit(self._version)

    def _announce(self, version: int) -> None:
        """Publish, for each destination of this rank, that the version is complete, with digests of its
        values."""
        if self._place.device == "cuda":
            torch.cuda.synchronize()  # the optimizer's kernels; other processes do not see our streams
        self._find_sources()
        for dst in self._sends:
            is_pulled = self._transports[self.rank, dst] in PULLED
            has_moved = is_pulled and self._announced.get(dst) is not self._exported
            moved = self._exported if has_moved else None
            digest = self._digests[dst]
            full = digest.full() if self.options.check_weight_sync else None
            self._store.write(
                f"{self._round}/{self.rank}>{dst}", Arrival(version, digest.sampled(version), full, moved)
            )
            if moved is not None:
                self._announced[dst] = moved

    def _announce_problem(self) -> None:
        """Tell the ranks that wait for this one why it does not go on, so that they need not wait until the
        deadline."""
        arrival = Arrival(self._version, [], problem=self._problem)
        values = {f"{self._round}/{self.rank}>{dst}": arrival for dst in self._sends}
        for key, value in {**values, f"{self._round}/ready/{self.rank}": self._problem}.items():
            if not self._store.has_written(key):
                self._store.write(key, value)

    def _run_messages(self) -> None:
        """Send and receive the weights that travel as messages, if there are any.

        Ranks wait for their peers by the store first. A message without a peer would block for the timeout
        of the process group, and could not name the peer."""
        if self._messages is None:
            return
        self._store.write(f"{self._round}/ready/{self.rank}", None)
        task = f"come to exchange version {self._version}"
        for peer in self._messages.peers:
            problem = self._read(f"{self._round}/ready/{peer}", str | None, peer, task)
            if problem is not None:
                raise SyncError(problem)
        self._messages.run(self._deadline)

    def _await_sources(self, version: int) -> dict[int, dict[int, Arrival]]:
        arrivals: dict[int, dict[int, Arrival]] = {}
        problem = None
        for src, dst in self._receives:
            arrival = self._read(f"{self._round}/{src}>{dst}", Arrival, src, f"make version {version} ready")
            if arrival.version != version:
                raise SyncError(
                    f"rank {src} has version {arrival.version}, this rank was told to take version {version}"
                )
            arrivals.setdefault(dst, {})[src] = arrival
            if arrival.exported is not None:
                self._new_pulls.setdefault(dst, {})[src] = (arrival.exported, None)
            problem = problem or arrival.problem
        if problem is not None:  # after the loop: other sources tell only once where their weights lie
            raise SyncError(problem)
        return arrivals

    def _vote(self, problem: str | None) -> str | None:
        """Return the verdict on this version: the error of the lowest rank that has one, or None."""
        root = self.participants[0]
        self._store.write(f"{self._round}/vote/{self.rank}", problem)
        if self.rank == root:
            self._store.write(f"{self._round}/verdict", self._count_votes())
        try:
            return self._store.read(f"{self._round}/verdict", str | None, self._deadline + 2 * _GRACE_S)
        except Late:
            return problem or f"[rank {root}] gave no verdict in time: it hangs or has died"

    def _count_votes(self) -> str | None:
        problems, late = [], []
        for peer in self.participants:
            try:
                key = f"{self._round}/vote/{peer}"
                problems.append(self._store.read(key, str | None, self._deadline + _GRACE_S))
            except Late:
                late.append(_late(f"[rank {peer}] did not take part", self.options.reshard_timeout_s))
        return next(filter(None, [*problems, *late]), None)

    def _read(self, key: str, kind: type[T], peer: int, task: str) -> T:
        try:
            return self._store.read(key, kind, self._deadline)
        except Late:
            what = f"rank {peer} did not {task}"
            raise SyncError(_late(what, self.options.reshard_timeout_s)) from None


def sync_plan(
    shape: ModelShape,
    sources: dict[int, Atlas],
    rollout_ranks: Sequence[int],
    tp: int,
    timeout_s: float,
    actor: str = "",
    backend: str = "vllm",
) -> tuple[ReshardPlan, dict[int, int]]:
    """Return the plan from the sources to all out-of-process engines, and rollout rank -> the rank that
    speaks for its engine.

    Engines are consecutive blocks of `tp` ranks. The first rank of a block speaks for the block. The result
    is the same on every rank that calls this. If there is no table of the backend's layout of this model,
    this waits for every engine to publish its atlas (`publish_atlases`).

    Raises: SyncError naming a rank that has not published its atlas within timeout_s."""
    atlases = engine_atlases(backend, shape, rollout_ranks, tp)
    if atlases is None:
        atlases = _published_atlases(rollout_ranks, timeout_s, actor)
    plan = make_plan(sources, atlases, ranks_per_node())
    return plan, {rank: rollout_ranks[index - index % tp] for index, rank in enumerate(rollout_ranks)}


_ATLASES = "atlases"  # name of a separate key-value store


def publish_atlases(atlases: dict[int, Atlas], actor: str = "") -> None:
    """Publish what each rank of an out-of-process engine holds, for a model type that has no table of vLLM's
    layout.

    The rank that started the engine calls this."""
    store = KeyValueStore(_ATLASES + actor)
    for rank, atlas in atlases.items():
        store.write(str(rank), atlas)


def _published_atlases(rollout_ranks: Sequence[int], timeout_s: float, actor: str) -> dict[int, Atlas]:
    store, deadline = KeyValueStore(_ATLASES + actor), time.monotonic() + timeout_s
    atlases = {}
    for rank in rollout_ranks:
        try:
            atlases[rank] = store.read(str(rank), Atlas, deadline)
        except Late:
            what = f"the engine of rank {rank} did not say what it holds"
            raise SyncError(_late(what, timeout_s)) from None
    return atlases


def _late(what: str, timeout_s: float) -> str:
    return f"{what} within --reshard-timeout-s ({timeout_s:g}): it hangs or has died"


def _described(rank: int, version: int | None, error: Exception) -> str:
    text = str(error) if isinstance(error, SyncError | ValueError) else f"{type(error).__name__}: {error}"
    where = f"[rank {rank}] " if version is None else f"[rank {rank}] weights of version {version}: "
    return str(error) if str(error).startswith("[rank") else where + text
