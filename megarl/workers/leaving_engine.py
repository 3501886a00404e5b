"""Let a rank go on when its engine, in processes of its own, has ended or hangs.

the rank       ends the engine's processes, keeps the finished samples, and writes the tokens of unfinished
               requests to a file in engines/moved/ of the run folder
the driver     hears of it by an event, and lets other engines go on with these requests from the file
`start_engine` starts the engine again; it is back with the next weights"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.flow.events import ENGINE_CHANGED, EngineChange
from megarl.loggers.json_lines import moved_requests
from megarl.rollout.engine_errors import EngineFailed
from megarl.rollout.processes import EngineDied
from megarl.runtime.hosting import WorkerContext
from megarl.workers.engine_recorder import EngineRecorder
from megarl.workers.hosted_role import HostedRole
from megarl.workers.request_stream import RequestStream

if TYPE_CHECKING:
    from megarl.rollout.engine import Engine


def without_engine(result: Callable[[], object]) -> Callable[[Callable], Callable]:
    """Let a method of the rollout role return `result()` if the engine ends or hangs during the call and the
    job goes on without it. Use as a decorator."""

    def declare(method: Callable) -> Callable:
        @functools.wraps(method)
        def call(self: LeavingEngine, *args: object, **kwargs: object) -> object:
            try:
                return method(self, *args, **kwargs)
            except (EngineDied, EngineFailed) as error:
                self.leave(error)
                return result()

        return call

    return declare


class LeavingEngine(HostedRole):
    """The part of the rollout role that drops an engine after a failure, and takes it back after a
    restart."""

    context: WorkerContext | None = None
    """What the rank offers for requests that outlive a call: events to the driver and the idle hook."""
    engine: Engine | None = None
    """The engine. None on ranks that only lend their device to an out-of-process engine."""
    stream: RequestStream | None = None
    """Requests that outlive a call; None without an engine."""
    recorder: EngineRecorder | None = None
    """Log of what happens to the engine; None where `stream` is None."""
    has_left: bool = False
    """Whether the engine has ended or hangs, and the job goes on without it."""
    is_joining: bool = False
    """Whether the engine was started again and waits for its first weights."""

    @property
    def replica(self) -> int:
        """Number of this rank's engine among the engines of the role."""
        return self.mesh.coordinates(self.rank)["dp"]

    @property
    def has_engine(self) -> bool:
        """Whether this rank has an engine that samples."""
        return self.engine is not None and not self.has_left

    def leave(self, error: Exception) -> None:
        """Drop the engine from the role, or raise the error if the job cannot go on without the engine."""
        engine, others = self.engine, self.mesh.dp - 1
        is_remote = engine is not None and hasattr(engine, "may_leave") and self.stream is not None
        if not is_remote or not engine.may_leave:
            if is_remote and others:
                error.args = (
                    f"{error}. It is engine {self.replica} of {self.name}; with --min-engines {others} the "
                    "others would go on",
                )
            raise error
        if engine.failure is None:
            engine.leave(error)
        self.has_left = True
        path = moved_requests(Path(self.config.run.save)) / f"{self.name}_engine_{self.replica}.msgpack"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.stream.give_up(path)
        self.context.emit(ENGINE_CHANGED, EngineChange(self.name, self.replica, False, str(error)))

    def start_engine(self) -> str:
        """Restart the engine of this rank after it has ended or hung. The engine gets weights at the next
        `sync`. Returns why it cannot be started, or ""."""
        if self.has_left and self.engine.failure is not None:
            try:
                self.engine.restart()
            except (EngineDied, EngineFailed, ValueError, OSError) as error:
                return str(error)
            self.recorder.use(self.engine.inference)
            self.is_joining = True
        return ""

    @without_engine(lambda: None)
    def forget_requests(self) -> None:
        """Forget all unfinished requests. An engine that has ended meanwhile leaves, if it may."""
        self.stream.abort()

    @without_engine(lambda: None)
    def prepare_sync(self) -> None:
        """Let the engine finish what it must do with its old weights, before a sync."""
        if self.stream is None or not self.has_engine or self.engine.is_pinned:
            return
        if self.config.streaming.weight_update == "wait":
            self.stream.drain()
        self.recorder.catch_up()  # before the weights are overwritten

    @without_engine(lambda: None)
    def complete_sync(self, version: int) -> None:
        """Let the engine continue with its new weights after a sync, or drop the engine if it failed in the
        sync."""
        if self.stream is None:
            return
        failure, was_joining = getattr(self.engine, "failure", None), self.is_joining
        self.is_joining = False
        if failure is not None:
            if not self.has_left:
                self.leave(failure)
            elif was_joining:  # its requests went to the others when it left
                self.context.emit(ENGINE_CHANGED, EngineChange(self.name, self.replica, False, str(failure)))
            return
        if not self.recorder.is_started:
            self.recorder.start(version)
            self.engine.committing = self.recorder.committing
        if self.has_left:  # it was started again
            self.has_left = False
            self.context.emit(ENGINE_CHANGED, EngineChange(self.name, self.replica, True))
        self.stream.go_on()
