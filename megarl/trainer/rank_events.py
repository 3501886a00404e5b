"""Act on what ranks report outside of calls: groups that are finished, engines that leave or join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from megarl.config.mesh import MeshSpec
from megarl.flow import Reward, Rollout
from megarl.flow.events import ENGINE_CHANGED, GROUPS_FINISHED, HELD_OUT_FINISHED, FinishedGroups
from megarl.futures import Future
from megarl.messages import decode, encode
from megarl.runtime.executor import Executor
from megarl.trainer.early_scores import EarlyScores
from megarl.trainer.engine_set import EngineSet
from megarl.trainer.evaluation import Answering
from megarl.trainer.pinned_evaluation import PinnedEvaluation
from megarl.trainer.routing import route
from megarl.trainer.state import TrainState

_ACTED_ON = (GROUPS_FINISHED, HELD_OUT_FINISHED, ENGINE_CHANGED)


class RankEvents:
    """Takes the events of ranks, while the driver waits and before it decides something.

    Args:
        meshes: role -> its mesh.
        early: gives groups that are finished to reward models."""

    def __init__(
        self,
        executor: Executor,
        meshes: Mapping[str, MeshSpec],
        state: TrainState,
        engines: EngineSet,
        early: EarlyScores,
    ) -> None:
        self._executor, self._meshes, self._state = executor, meshes, state
        self._engines, self._early = engines, early
        self.num_reported = 0
        """Number of samples that engines have reported so far."""
        self.pinned = PinnedEvaluation(executor, meshes, state, self.take, lambda: self.num_reported)
        """The evaluation that goes on beside training, if there is one."""

    def take(self) -> None:
        """Add the groups that engines have reported since the last call to the actors' buffers, and move those
        of engines that have left."""
        changes = self._engines.take_changes()
        for event in self._executor.take_events(GROUPS_FINISHED):
            finished = decode(encode(event.payload), FinishedGroups)
            self.num_reported += len(finished.samples)
            self._state.actor_of(finished.role).buffer.add(finished.samples)
        for event in self._executor.take_events(HELD_OUT_FINISHED):
            answered = decode(encode(event.payload), FinishedGroups)
            self.num_reported += len(answered.samples)
            self.pinned.add(answered)
        self._engines.apply(changes)
        self._early.begin()

    def wait_any(self, futures: Sequence[Future[Any]]) -> list[Future[Any]]:
        """Wait until a future is done, and return those that are done. Returns earlier, maybe with none, if an
        event arrives on which somebody acts at once."""
        if not self._early.roles and self.pinned.pending is None:
            return self._executor.wait_any(futures)
        pending = [] if self.pinned.pending is None else [self.pinned.pending]
        done = self._executor.wait_any([*futures, *pending], or_event=_ACTED_ON)
        self.take()
        self.pinned.advance()
        return [future for future in done if future not in pending]

    def answering(self, suffix: str) -> Answering:
        """Return the roles of an actor with which an evaluation answers that everything waits for."""
        role = f"rollout{suffix}"
        reward = Reward(self._executor, f"reward{suffix}")
        return Answering.by_all(Rollout(self._executor, role), reward, partial(self.route_rows, role))

    def route_rows(self, rollout: str, count: int) -> list[int] | None:
        """Return an engine for each of `count` held-out rows, or None if all engines of the role are there."""
        self.take()
        closed = self._state.actor_of(rollout).buffer.closed_engines
        loads = [None if engine in closed else 0 for engine in range(self._meshes[rollout].dp)]
        return route(count, loads) if closed else None
