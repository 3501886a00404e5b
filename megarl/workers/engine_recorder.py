"""Write the log of one engine, and in a replay make the engine stop at the engine steps at which logged
events took place.

    recorder.start(version=0)
    with recorder.taking_effect(Admit(step=1, version=0, visits=(0, 1))):
        stream.add(answers)

Without --replay the record gets the number of steps that the engine has made. With it the engine first goes
on to the step at which the logged run has this record, and does not go beyond the step of the next one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from megarl.rollout.replay_log import (
    Commit,
    EngineRecord,
    ReplayError,
    ReplayLog,
    Turns,
    path_of,
    planned_records,
    text_of,
)

_IDLE_S = 5.0
"""Seconds that an engine without unfinished requests may take to report its last step."""


class HeldEngine(Protocol):
    """The methods of an InferenceEngine that the recorder needs."""

    process: str | None

    @property
    def num_steps(self) -> int: ...

    def has_unfinished(self) -> bool: ...

    def hold(self, step: int | None) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class EngineRecorder:
    """Writes what happens to one engine, and in a replay lets it happen at the same engine steps as before.

    The ranks of a tensor-parallel engine make the same calls; one of them writes.

    Args:
        step: takes a step of the engine and takes over what has finished. Out of process it waits a moment
            for the engine, which steps by itself.
        name: name of the engine's file.
        run: folder of this run; None on ranks that do not write.
        replay: folder of the run that is repeated.
        timeout_s: seconds without an engine step after which a replay fails."""

    def __init__(
        self,
        engine: HeldEngine,
        step: Callable[[], None],
        name: str,
        run: Path | None,
        replay: Path | None,
        timeout_s: float,
    ) -> None:
        self._engine, self._step, self._name, self._run = engine, step, name, run
        self._replay, self._timeout_s = replay, timeout_s
        self._steps_by_itself = engine.process is not None
        self._log: ReplayLog | None = None
        self._planned: deque[EngineRecord] = deque()
        self.is_started = False

    def start(self, version: int) -> None:
        """Begin the log and the replay, when the engine has its first weights.

        Args:
            version: number of training steps done.
        Raises: ReplayError if the log of the run to repeat cannot be read."""
        if self._run is not None:
            self._log = ReplayLog(self._run, self._name, version)
        if self._replay is not None:
            self._planned.extend(planned_records(self._replay, self._name, version))
            self._hold()
        self.is_started = True

    def use(self, engine: HeldEngine) -> None:
        """Continue with an engine that was restarted, whose steps count from 0."""
        self._engine = engine

    def is_held(self) -> bool:
        """Return whether an engine in this process must not take a step now. An engine that steps by itself
        stops without being asked."""
        if self._steps_by_itself or not self._planned or isinstance(self._planned[0], Turns):
            return False
        return self._engine.num_steps >= self._planned[0].engine_step

    def catch_up(self) -> None:
        """Let the engine go on to the step of its next planned record that is no reply of an environment.
        Does nothing without --replay."""
        self._pass_replies()
        if self._planned:
            self._reach(self._planned[0])

    @contextmanager
    def taking_effect(self, record: EngineRecord) -> Iterator[None]:
        """Context in which the event that the record describes takes place. The engine takes no step
        meanwhile, and its `take` has everything that it has finished.

        The record is on the disk before.

        Args:
            record: without its engine step.
        Raises: ReplayError if the run that is repeated does something else now."""
        if not isinstance(record, Turns):
            self._pass_replies()
        expected = self._planned[0] if self._planned else None
        if expected is not None:
            self._check(expected, record)
            self._reach(expected)
        if self._steps_by_itself:
            self._engine.pause()
        try:
            if self._log is not None:
                self._log.write(msgspec.structs.replace(record, engine_step=self._engine.num_steps))
            yield
            if expected is not None:
                self._planned.popleft()
                self._hold()
        finally:
            if self._steps_by_itself:
                self._engine.resume()

    def committing(self, version: int) -> AbstractContextManager[None]:
        """Return the context in which new weights are committed, with a record in the log. The commit
        completes the training step of the same number."""
        return self.taking_effect(Commit(step=version, version=version))

    # Replies of environments, which no call of the driver brings.

    @property
    def has_plan(self) -> bool:
        """Whether the run that is repeated says what comes next."""
        return bool(self._planned)

    def due_replies(self) -> Turns | None:
        """Return the replies that take effect now in the run that is repeated."""
        first = self._planned[0] if self._planned else None
        is_due = isinstance(first, Turns) and first.engine_step <= self._engine.num_steps
        return first if is_due else None

    def unexpected(self, record: Turns) -> ReplayError:
        """Return the error for due replies that an episode cannot get."""
        return self._error(f"{text_of(record)} is next there, and an episode here is at no such reply")

    def _pass_replies(self) -> None:
        """Take steps until all replies have taken effect that come before the next other planned record."""
        last = time.monotonic()
        while self._planned and isinstance(record := self._planned[0], Turns):
            self._reach(record)
            self._step()
            if not self._planned or self._planned[0] is not record:
                last = time.monotonic()
            elif time.monotonic() - last > self._timeout_s:
                raise self.unexpected(record)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _hold(self) -> None:
        """Make an engine that steps by itself stop at its next planned record."""
        if self._steps_by_itself:
            self._engine.hold(self._planned[0].engine_step if self._planned else None)

    def _check(self, expected: EngineRecord, record: EngineRecord) -> None:
        if msgspec.structs.replace(expected, engine_step=-1) != record:
            now = self._engine.num_steps
            raise self._error(
                f"that run goes on with {text_of(expected)}, and this job, after {now} steps of the engine, "
                f"with {text_of(msgspec.structs.replace(record, engine_step=now))}"
            )

    def _reach(self, record: EngineRecord) -> None:
        """Take engine steps until the engine is at the step at which the record's event took place.

        Raises: ReplayError if it has made more steps, or does not get there."""
        done, last = self._engine.num_steps, time.monotonic()
        while done < record.engine_step:
            self._step()
            before, done = done, self._engine.num_steps
            now = time.monotonic()
            if done > before:
                last = now
            elif now - last > (self._timeout_s if self._engine.has_unfinished() else _IDLE_S):
                state = "is stuck" if self._engine.has_unfinished() else "has nothing left to do"
                raise self._error(f"{text_of(record)} is next there, and the engine {state} at step {done}")
        if done > record.engine_step:
            raise self._error(f"{text_of(record)} is next there, and the engine is at step {done} already")

    def _error(self, what: str) -> ReplayError:
        assert self._replay is not None
        return ReplayError(
            f"--replay ({self._replay}): this job differs from that run. By {path_of(self._replay, self._name)} "
            f"{what}."
        )
