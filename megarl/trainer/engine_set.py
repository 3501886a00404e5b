"""Keep the set of engines of a job: move the groups of an engine that leaves to the others, and start engines
again on request.

The tokens of unfinished requests go from rank to rank by a file of the run folder; the driver has ids only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from megarl.config.mesh import MeshSpec
from megarl.failures import ExplainedError
from megarl.loggers.engine_states import (
    JOINING,
    LEFT,
    LIVE,
    EngineRequest,
    EngineState,
    take_requests,
    write_states,
)
from megarl.flow import Rollout
from megarl.flow.events import ENGINE_CHANGED, EngineChange
from megarl.loggers.json_lines import moved_requests
from megarl.messages import decode, encode
from megarl.role_names import kind_and_suffix
from megarl.rollout.replay_log import EngineJoined, EngineLeft
from megarl.runtime.executor import Executor
from megarl.runtime.messages import Event
from megarl.trainer.replay import DriverLog
from megarl.trainer.state import TrainState


class TooFewEngines(ExplainedError, RuntimeError):
    """Raised when fewer engines are left than --min-engines."""

    read_on = "docs/asynchronous.md, section Engines that come and go"


class EngineSet:
    """The engines of all rollout roles of an asynchronous job, and which of them are still working.

    Args:
        meshes: role -> its mesh."""

    def __init__(self, executor: Executor, meshes: Mapping[str, MeshSpec], state: TrainState) -> None:
        self._executor, self._meshes, self._state = executor, meshes, state
        self._min = state.first.config.streaming.min_engines
        self._folder = Path(state.first.config.run.save)
        self._log: DriverLog | None = None
        self._states: dict[tuple[str, int], EngineState] = {}
        self._num_moved: Counter[str] = Counter()  # groups since the last metrics, by suffix of the actor

    def start(self, log: DriverLog) -> None:
        """Begin with all engines, and remove requests and files that an earlier job in the run folder left
        behind."""
        self._log = log
        if self._min is None:
            return
        take_requests(self._folder)
        for path in moved_requests(self._folder).glob("*"):
            path.unlink()
        for role, mesh in self._meshes.items():
            if kind_and_suffix(role)[0] == "rollout":
                for engine in range(mesh.dp):
                    ranks = tuple(mesh.ranks[engine * mesh.tp : (engine + 1) * mesh.tp])
                    self._states[role, engine] = EngineState(role, engine, ranks)
        write_states(self._folder, [*self._states.values()])

    @property
    def log(self) -> DriverLog:
        """The driver's log of the run, which `start` has set."""
        assert self._log is not None
        return self._log

    def start_requested(self) -> None:
        """Start the engines that `megarl engines add` has asked for. They get weights at the end of the step,
        and groups from the next one on."""
        for request in take_requests(self._folder) if self._states else ():
            state = self._states.get((request.role, request.engine))
            if state is not None and state.state == LEFT:
                rollout = Rollout(self._executor, request.role).on([state.ranks[0]])
                failure = rollout.start_engine().first()
                self._set(request, LEFT if failure else JOINING, failure or "")
                self._note(request, f"cannot be started: {failure}" if failure else "is started")

    def take_changes(self) -> list[Event]:
        """Return what has happened to engines since the last call, for `apply`.

        Call this before the finished groups are taken: an engine reports them before it leaves."""
        return self._executor.take_events(ENGINE_CHANGED)

    def apply(self, changes: list[Event]) -> None:
        """Note engines that have left or joined, and give the unfinished groups of lost ones to the others.

        Raises: TooFewEngines if fewer are left than --min-engines."""
        for event in changes:
            change = decode(encode(event.payload), EngineChange)
            buffer, step = self._state.actor_of(change.role).buffer, self._state.step
            if change.is_live:
                buffer.lost_engines.discard(change.engine)
                self.log.write(EngineJoined(step=step, role=change.role, engine=change.engine))
                self._set(change, LIVE, "")
                self._note(change, "has the weights and gets prompts")
                continue
            lost = buffer.lose_engine(change.engine)
            self.log.write(
                EngineLeft(step=step, role=change.role, engine=change.engine, reason=change.reason)
            )
            self._set(change, LEFT, change.reason)
            self._note(
                change, f"has left: {change.reason}; its {len(lost)} unfinished prompts go to the others"
            )
            self._check_number(change)
            self._move(change.role, len(lost))

    def _move(self, role: str, number: int) -> None:
        """Hand the waiting groups to the engines that are left, which continue them."""
        actor = self._state.actor_of(role)
        self._num_moved[actor.suffix] += number
        engines = self.log.route(actor.suffix, self._state.step, actor.buffer, self._meshes[role].dp)
        if engines:
            folder = str(moved_requests(self._folder))
            Rollout(self._executor, role).load_requests(folder, actor.buffer.issue(engines), engines)

    def _check_number(self, change: EngineChange) -> None:
        live = self._num_live(change.role)
        if self._min is not None and live < self._min:
            raise TooFewEngines(
                f"engine {change.engine} of {change.role} has left: {change.reason}. Of {change.role}'s "
                f"{self._meshes[change.role].dp} engines {live} are left, and --min-engines ({self._min}) "
                "needs more. Start the job again with --load"
            )

    def _num_live(self, role: str) -> int:
        return self._meshes[role].dp - len(self._state.actor_of(role).buffer.lost_engines)

    def metrics(self, suffix: str) -> dict[str, float]:
        """Return the metrics engines/* of an actor's step; {} without --min-engines."""
        if not self._states or f"rollout{suffix}" not in self._meshes:
            return {}
        moved = self._num_moved.pop(suffix, 0)
        return {"engines/live": float(self._num_live(f"rollout{suffix}")), "engines/moved": float(moved)}

    def _set(self, change: EngineChange | EngineRequest, state: str, reason: str) -> None:
        kept = self._states[change.role, change.engine]
        kept.state, kept.reason, kept.step = state, reason, self._state.step
        write_states(self._folder, [*self._states.values()])

    def _note(self, change: EngineChange | EngineRequest, what: str) -> None:
        self.log.note(f"step {self._state.step}: engine {change.engine} of {change.role} {what}")
