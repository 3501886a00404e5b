"""Start and stop the profilers of the ranks around the steps of --profile-step-start and
--profile-step-end."""

from __future__ import annotations

from pathlib import Path

from megarl.config.schema import TrainConfig
from megarl.flow.job_roles import Profiler
from megarl.runtime.executor import Executor
from megarl.trainer.run_folder import PROFILE, Run


class ProfiledSteps:
    """Starts and stops the profilers for the steps that --profile asks for, outside of the measured time of
    steps. Without the flag every method returns at once."""

    def __init__(self, config: TrainConfig, executor: Executor, run: Run) -> None:
        self._profile, self._executor, self._run = config.profile, executor, run
        self._first: int | None = None  # first step of the profile that is being recorded
        self._last = 0  # last completed step of that profile
        self._is_over = config.profile.profile is None

    def begin(self, step: int) -> None:
        """Start the profilers if this step is the first to be profiled, or a resumed job begins with a later
        one."""
        steps = self._profile.steps
        if self._is_over or self._first is not None or step < steps[0]:
            return
        if step > steps[-1]:
            self._is_over = True
            self._run.progress.note(
                f"--profile-step-end ({self._profile.profile_step_end}): the job goes on at step {step}, so "
                "nothing is profiled."
            )
            return
        self._note(Profiler(self._executor, "profiler").start().result())
        self._first = step

    def end(self, step: int) -> None:
        """Stop the profilers if this completed step is the last one to be profiled."""
        self._last = step
        if self._first is not None and step >= self._profile.steps[-1]:
            self.stop()

    def stop(self) -> None:
        """Stop the profilers, if they are recording, and let them write their files."""
        if self._first is None:
            return
        first, last = self._first, max(self._first, self._last)
        self._first, self._is_over = None, True
        folder = Path(self._run.folder) / PROFILE
        name = f"step_{first}" if first == last else f"steps_{first}-{last}"
        self._note(Profiler(self._executor, "profiler").stop(str(folder), name).result())

    def _note(self, of_ranks: list[list[str]]) -> None:
        for note in dict.fromkeys(note for notes in of_ranks for note in notes):
            self._run.progress.note(note)
