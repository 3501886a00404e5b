"""Write the driver's part of an asynchronous run's log, and let --replay decide as the logged run did.

megarl/rollout/replay_log.py defines the records. The engines' part is megarl/workers/engine_recorder.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megarl.config.schema import TrainConfig
from megarl.flow.job_roles import Record as Score
from megarl.rollout.replay_log import (
    DRIVER,
    DriverPlan,
    Record,
    ReplayLog,
    RewardFailed,
    Route,
    Save,
    Take,
)
from megarl.rollout.replay_settings import replay_settings
from megarl.trainer.buffer import SampleBuffer
from megarl.trainer.groups import Group
from megarl.trainer.rollout_batch import score_field
from megarl.trainer.state import TrainState


class DriverLog:
    """The driver's log of an asynchronous run, and the decisions of the run that --replay repeats.

    Args:
        config: configuration of the job.
        note: shows a line to the user.
    Raises: ReplayError if the run cannot be repeated with this configuration."""

    def __init__(self, config: TrainConfig, world_size: int, note: Callable[[str], None]) -> None:
        self._folder, self._replay, self.note = Path(config.run.save), config.streaming.replay, note
        self._settings = replay_settings(config, world_size)
        self._plan = DriverPlan()
        if self._replay is not None:
            self._plan = DriverPlan.read(Path(self._replay), self._settings)
        self._log: ReplayLog | None = None

    def start(self, state: TrainState) -> None:
        """Begin the log, after the checkpoint of --load is restored, and let the buffers take the groups that
        the plan names."""
        self._log = ReplayLog(self._folder, DRIVER, state.completed, self._settings)
        for suffix, actor in state.actors.items():
            taken = {step: visits for (of, step), visits in self._plan.taken.items() if of == suffix}
            actor.buffer.replayed = taken

    def is_replaying(self, step: int) -> bool:
        """Return whether the run that is repeated began this step."""
        return step <= self._plan.last_step

    def route(self, suffix: str, step: int, buffer: SampleBuffer, num_engines: int) -> list[int]:
        """Return the engine of each prompt that waits in an actor's buffer."""
        if self._replay is not None and step == self._plan.last_step + 1:
            self.note(f"--replay ({self._replay}): ended with step {step - 1}; this job goes on freely")
        chosen = buffer.engines(num_engines)
        visits = [group.visit for group in buffer.waiting()]
        engines = [self._plan.engines.get((suffix, visit), own) for visit, own in zip(visits, chosen)]
        self.write(Route(step=step, suffix=suffix, visits=tuple(visits), engines=tuple(engines)))
        return engines

    def take(self, suffix: str, step: int, groups: Sequence[Group]) -> None:
        """Log the groups that a step trains on."""
        visits = tuple(group.visit for group in groups)
        self.write(Take(step=step, suffix=suffix, visits=visits))

    def scores(self, role: str, step: int, per_rank: Iterable[Iterable[Score]]) -> list[list[Score]]:
        """Return the scores of a role, without those that it did not give in the run that is repeated.

        A score that is missing now and was there then stays missing."""
        forced = {*self._plan.failed.get((role, step), ())}
        lost = {score_field(role): None, "failure": f"failed in {self._replay}"}
        scores = [
            [score | lost if score["sample_id"] in forced else score for score in rank] for rank in per_rank
        ]
        failed = [one["sample_id"] for rank in scores for one in rank if one[score_field(role)] is None]
        if failed:
            self.write(RewardFailed(step=step, role=role, samples=tuple(failed)))
        return scores

    def must_save(self, step: int) -> bool:
        """Return whether the run that is repeated has a checkpoint of this step.

        A checkpoint lets the engines compute the KV cache of unfinished requests anew, so a replay needs the
        same ones."""
        return step in self._plan.saved

    def may_save(self, step: int) -> bool:
        """Return whether a checkpoint of this step lets the replay go on as the run that it repeats."""
        return step in self._plan.saved or step >= self._plan.last_step

    def save(self, step: int) -> None:
        """Log that a checkpoint begins."""
        self.write(Save(step=step))

    def write(self, record: Record) -> None:
        """Append a record to the log."""
        assert self._log is not None, "`start` comes first"
        self._log.write(record)
