"""Run an inference engine in processes of its own, on ranks that need not train.

    # on the first of the engine's ranks, not collective
    engine = OutOfProcessEngine(config, shape, ranks, rollout_ranks)
    engine.connect(atlases, parameters)
    engine.sync(version)                     # collective over sources and first ranks of engines
    engine.generate(prompts, keys, temperature=1.0)
    engine.shutdown()

The backend starts a process, or with tensor parallelism one process per rank of the engine. These processes
use the devices of the engine's ranks, while the ranks' own processes wait. They pull the weights out of the
memory that the trainers export (`reshard/sync.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from megarl.config.hf_config import ModelShape
from megarl.config.rollout_backends import rollout_backend
from megarl.config.schema import TrainConfig
from megarl.reshard.atlas import Atlas
from megarl.reshard.destination import Arrival
from megarl.reshard.engine_atlas import engine_atlases
from megarl.reshard.plan import ReshardPlan
from megarl.reshard.receiver import Pull
from megarl.reshard.sync import publish_atlases, sync_plan
from megarl.rollout.backends import EngineSetup, start_process
from megarl.rollout.engine import Engine
from megarl.rollout.engine_errors import EngineFailed
from megarl.rollout.processes import EngineDied
from megarl.rollout.puller import Order
from megarl.runtime.abort import AbortableEngine


class OutOfProcessEngine(Engine):
    def __init__(
        self,
        config: TrainConfig,
        shape: ModelShape,
        ranks: Sequence[int],
        rollout_ranks: Sequence[int],
        actor: str = "",
    ) -> None:
        """Start an engine in processes of its own. Its weights are undefined until the first `sync`.

        Args:
            ranks: ranks of this engine; this process is the first.
            rollout_ranks: ranks of all engines, in consecutive blocks of tensor_parallel_size.
            actor: suffix of the actor that the engine samples for.
        Raises: ValueError for engine arguments that cannot work."""
        super().__init__(config, shape, actor)
        self.ranks, self.rollout_ranks, self.rank = tuple(ranks), tuple(rollout_ranks), dist.get_rank()
        self.may_leave = may_leave(config)
        """Whether the job goes on without this engine."""
        self.failure: Exception | None = None
        """Why the engine has left the set; None while it is in it."""
        self._start()
        self._plan: ReshardPlan | None = None
        self._pulls: dict[int, dict[int, Pull]] = {}
        """Rank of the engine -> source -> memory to pull from, all that sources have told so far."""
        if engine_atlases(config.rollout.backend, shape, self.ranks, self._tp) is None:
            publish_atlases(self.inference.atlases, actor)

    def _start(self) -> None:
        num_engines = len(self.rollout_ranks) // self._tp
        setup = EngineSetup(self.config, self.shape, self.ranks, num_engines)
        self.inference = start_process(setup, _double_buffer(self.config))
        self.inference.patience.is_limited = self.may_leave
        AbortableEngine(self.inference)
        self._is_new = True  # knows neither the plan nor the sources' memory

    def restart(self) -> None:
        """Start new processes for an engine whose processes were ended by `leave`. They have no weights until
        the next `sync`.

        Raises: EngineFailed or EngineDied if they cannot start."""
        self._start()
        self.failure = None

    def leave(self, failure: Exception) -> None:
        """End the engine's processes after a failure. Later syncs leave the engine out."""
        self.failure, self.is_pinned = failure, False
        self.inference.kill()

    @property
    def _is_left_out(self) -> bool:
        """Whether this rank takes part in a sync for the others' sake only."""
        return self.failure is not None or self.is_pinned

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        """Context in which failed processes make the engine leave, if it may, instead of raising an error.

        The rank of an engine that has left goes on taking part in the syncs, and votes for every version."""
        try:
            yield
        except (EngineDied, EngineFailed) as error:
            if not self.may_leave:
                raise
            self.leave(error)

    def connect(self, sources: dict[int, Atlas], parameters: dict[str, torch.Tensor]) -> None:
        """Plan which weights come from which ranks in `sources`, for all later syncs.

        Ranks without an engine make a WeightSync from the same `sync_plan`."""
        self._plan, speakers = sync_plan(
            self.shape,
            sources,
            self.rollout_ranks,
            self._tp,
            self.options.reshard_timeout_s,
            self.actor,
            self.config.rollout.backend,
        )
        self._join(self._plan, speakers, parameters)
        self._is_new, self._pulls = True, {rank: {} for rank in self.ranks}

    # Methods of a receiver of a weight sync.

    def begin(
        self,
        version: int,
        arrivals: dict[int, dict[int, Arrival]],
        pulls: dict[int, dict[int, Pull]],
        messages: Callable[[], object],
    ) -> None:
        for rank in self.ranks:
            self._pulls[rank] |= pulls.get(rank, {})
        self.bytes_per_sync = 0
        if self._is_left_out:
            self._is_new = True  # so that the next order has what is announced now
            return
        orders = [
            Order(arrivals[rank], self._pulls[rank], self._plan.copies_to(rank))
            if self._is_new
            else Order(arrivals[rank], pulls.get(rank, {}))
            for rank in self.ranks
        ]
        with self._leaving():
            self.inference.pull_weights(orders, self._copy_limit_s(self.options.reshard_timeout_s))
            self._is_new = False

    def verify(self, timeout_s: float) -> str | None:
        if self._is_left_out:
            return None
        with self._leaving():
            outcomes = self.inference.wait_for_weights(self._copy_limit_s(timeout_s))
            self.bytes_per_sync = sum(outcome.bytes for outcome in outcomes)
            return next((outcome.problem for outcome in outcomes if outcome.problem is not None), None)
        return None

    def _copy_limit_s(self, left_s: float) -> float:
        """Return how many of the seconds that are left to a sync the engine may use for its copy.

        If the job goes on without an engine that hangs, the rest is the time to find out that it hangs.
        Otherwise the other ranks would give up before this rank votes. A short time is shared by halves."""
        if not self.may_leave:
            return left_s
        return max(left_s - self.inference.patience.limit_s, left_s / 2)

    def commit(self, version: int) -> None:
        if not self._is_left_out:
            with self._leaving():
                super().commit(version)

    def give_up(self) -> None:
        if not self._is_left_out:
            with self._leaving():
                super().give_up()

    def shutdown(self) -> None:
        """End the engine's processes."""
        if self.failure is None:
            self.inference.shutdown()


def may_leave(config: TrainConfig) -> bool:
    """Return whether the job goes on without an engine that ends or hangs.

    A replay repeats a run that has lost none."""
    return config.streaming.min_engines is not None and config.streaming.replay is None


def _double_buffer(config: TrainConfig) -> bool:
    """Return whether the engine writes a version beside the one that samples.

    Raises: ValueError if --reshard-double-buffer asks for it and the engine may have CUDA graphs."""
    on_cpu, wanted = not torch.cuda.is_available(), config.reshard.reshard_double_buffer
    eager = rollout_backend(config).is_eager(config.rollout.enforce_eager, on_cpu)
    if wanted and not eager:
        raise ValueError(
            "--reshard-double-buffer: CUDA graphs and compiled code keep the addresses of the "
            "weights that they were made "
            "with, so the buffers cannot be switched. Leave it out, or add --rollout-enforce-eager."
        )
    return on_cpu and eager if wanted is None else wanted
