"""Write the run folder, which holds all files of a run.

resolved.args                the whole configuration;
                             `megarl train @resolved.args --save elsewhere` runs it again
attempt.json                 who has trained this run, and from which step, see `attempt.py`
metrics.jsonl                one JSON object per step, written as the step ends
tensorboard/                 the same as event files;
                             --log-with chooses this and other trackers, see megarl/loggers
rollouts/step_000001.jsonl   sampled prompts, responses and rewards of a step
timeline.json                when each call of the last steps ran and on which ranks, for ui.perfetto.dev
                             (written at the end, however the job ends)
profile/                     traces and tables of profiled steps, see `profiled_steps.py` and --profile
failure.log                  tracebacks of failures whose messages leave them out, see `resume_command.py`
engines/                     what driver and engines did in an asynchronous run, see `rollout/replay_log.py`
ref_log_probs/               the reference's log-probs of all rows, see `stored_reference.py`
failed_step.jsonl            samples of the last step that failed, see `failed_step.py`
rollouts/eval.jsonl          one held-out answer per evaluation
checkpoints/step_000010/     checkpoints for later jobs, see `trainer/checkpointer.py`
hf/, hf_critic/              exported weights (written by actor and critic)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from megarl.config.rules_files import free_name, goes_on, mark_of_run
from megarl.config.schema import TrainConfig
from megarl.files.writing import WriteError, writing
from megarl.loggers import LoggerContext, Tracker
from megarl.loggers.console import Progress
from megarl.trainer.attempt import ATTEMPTS, Attempt
from megarl.loggers.json_lines import METRICS, JsonLines, cut_after, remove_engine_logs

ARGUMENTS, ROLLOUTS, TIMELINE, PROFILE = "resolved.args", "rollouts", "timeline.json", "profile"


def check_folder_is_free(save: str) -> None:
    """Raise ValueError, which suggests a free folder, if `save` holds a run or is a file. Creates nothing."""
    folder = Path(save)
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"--save ({save}) is a file; it must be a folder that can be created. Try --save "
            f"{free_name(folder)}."
        )
    if (mark := mark_of_run(folder)) is not None:
        raise ValueError(
            f"--save ({save}) already holds a run ({mark}), and no run overwrites another. Try --save "
            f"{free_name(folder)}."
        )


def lock_folder(folder: Path) -> int:
    """Lock the run folder against other jobs and return the lock's file descriptor.

    The lock lasts until the descriptor is closed or the process ends.

    Raises: ValueError if another job holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"--save ({folder}): another job is running there. Wait for its end, or try --save "
            f"{free_name(folder)}."
        ) from None
    except OSError:
        pass  # a file system without locks
    return descriptor


class Run:
    """Records one run: JSON lines on the caller's thread, everything else on one background thread.

    An error of the background thread is raised by the next call. The constructor creates the folder, so make
    a Run only after all checks. A run that is resumed in its own folder (--load) changes nothing before
    `go_on_after`. Use the Run as a context manager, or call `close`. If the body of the context manager
    raises before the first record, the created files are removed, so that the same command can be tried
    again.

    Args:
        config: configuration of the job.
        resolved_args: text of resolved.args.
        progress: shows steps to the user; default: on stdout.
    Raises: ValueError if the folder cannot be written, or holds a run already and --load does not resume it.
    """

    def __init__(self, config: TrainConfig, resolved_args: str, progress: Progress | None = None):
        self.folder, self._resolved_args, self._config = Path(config.run.save), resolved_args, config.run
        self._files: JsonLines | None = None
        self._trackers: list[Tracker] = []
        self._background = ThreadPoolExecutor(1, thread_name_prefix="run_folder")
        self._writes: list[Future[object]] = []
        # The step and metrics whose evaluation may still follow, and the row that was written last.
        self._row: tuple[int, dict[str, float | int]] | None = None
        self._written_row: tuple[int, dict[str, float | int]] = (0, {})
        self._step_start = time.perf_counter()
        self._first_step: int | None = None
        self._attempt: Attempt | None = None
        self._lock: int | None = None
        self._has_failed = self._told_rewards = False
        self._created: list[Path] = []
        """Files and folders that this run created, in the order of their removal."""
        if not goes_on(config):
            check_folder_is_free(config.run.save)
            self._created = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            with self._unlocked_if_failed():
                self._open("x")  # "x": of two jobs that start at once, one gets the folder
                for tracker in self._trackers:
                    tracker.check()
        elif self.folder.exists():
            self._lock = lock_folder(self.folder)
        if progress is None:
            progress = Progress(config.batch.train_iters, interval=config.run.log_interval)
        self.progress = progress

    def lock(self) -> None:
        """Lock the folder against other jobs, unless this run has done so; make it if it is not there.

        Raises: ValueError if another job is running there."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self.folder) if self._lock is None else self._lock

    def go_on_after(self, step: int | None) -> None:
        """Resume in the run's own folder: remove the records of later steps. None begins the run anew.

        Step 0 goes on from a checkpoint before the first step, whose evaluation stays."""
        self.lock()
        self._attempt = Attempt(self.folder, step or 0)  # before the folder changes
        cut_after(self.folder, -1 if step is None else step)
        self._first_step = 0 if step is None else step + 1
        self._open("a")

    def _open(self, mode: Literal["x", "a"]) -> None:
        rollouts, arguments = self.folder / ROLLOUTS, self.folder / ARGUMENTS
        with writing(rollouts):
            rollouts.mkdir(parents=True, exist_ok=True)
        self.lock()
        with writing(arguments), open(arguments, "x" if mode == "x" else "w", encoding="utf-8") as file:
            if mode == "x":
                new = {self.folder / "tensorboard"} - {*self.folder.iterdir()}
                self._created = [arguments, self.folder / ATTEMPTS, rollouts, *new, *self._created]
            file.write(self._resolved_args)
        if mode == "x":
            remove_engine_logs(self.folder)  # of a first try that failed
            self._attempt = Attempt(self.folder, 0)
        self._files = JsonLines(self.folder, mode)
        if mode == "x":
            self._created.insert(0, self.folder / METRICS)
        context = LoggerContext(
            folder=self.folder,
            project=self._config.log_project,
            name=self._config.log_name or self.folder.resolve().name,
            first_step=self._first_step,
        )
        for name in self._config.log_with:
            self._trackers.append(Tracker(name, context, lambda text: self.progress.note(text)))
            self._trackers[-1].write("log_config", self._resolved_args)

    def begin_step(self) -> None:
        """Start the clock of the metric time/step_s, and write the previous step's metrics to disk and to the
        trackers."""
        self._write_row()
        self._step_start = time.perf_counter()

    def record_step(self, step: int, metrics: Mapping[str, float | int], num_tokens: int) -> None:
        """Record the step's metrics, its wall time and its tokens per second.

        Args:
            num_tokens: prompt and response tokens trained on."""
        seconds = time.perf_counter() - self._step_start
        row = {**metrics, "time/step_s": seconds, "throughput/tokens_per_s": num_tokens / seconds}
        self._row = step, row
        self.progress.update(step, row)
        rewards = row.get("time/reward_s", 0.0)
        if rewards > max(1.0, seconds / 2) and not self._told_rewards:
            self._told_rewards = True
            self.progress.note(
                f"step {step}: rewards took {rewards:.1f} of {seconds:.1f} s. --reward-num-workers says how many "
                "processes call the reward function"
            )

    def record_evaluation(
        self,
        step: int,
        scores: Mapping[str, float],
        answers: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
    ) -> None:
        """Add the scores of an evaluation to the line of `step` in metrics.jsonl, even if that line and those
        of later steps are already written.

        Step 0 has a separate row.

        Args:
            answers: score -> one of the samples that the score was computed from."""
        self.attempt.check(f"the evaluation of step {step}")
        for name, answer in answers.items():
            self._log_rollouts(step, [{"name": name, **answer}], "eval")
        self.progress.show_evaluation(step, scores)
        last = self._written_row[0] if self._row is None else self._row[0]
        if step < last:
            self._write_row()
            self._lines.add_to_row(step, scores)
            self._log_to_trackers("log_metrics", step, dict(scores), time.time())
            return
        before = self._lines.take_back(step) if self._row is None else self._row[1]
        self._row = step, {**before, **scores}
        self._write_row()

    def row_of(self, step: int) -> dict[str, float | int]:
        """Write the metrics of the last recorded step to metrics.jsonl. Returns these metrics if that step is
        `step`, else {}."""
        self._write_row()
        written, row = self._written_row
        return row if written == step else {}

    def recorded(self, steps: Container[int]) -> dict[int, dict[str, float]]:
        """Return step -> its metrics in metrics.jsonl, with the scores of evaluations that came later."""
        return self._lines.read_rows(steps)

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, object]]) -> None:
        """Record these samples of a step, with their texts, in rollouts/ and in the trackers."""
        if rows := list(rows):
            self._log_rollouts(step, rows, "train")

    def close(self) -> None:
        """Write all records, release the folder's lock, and raise the first error of the background thread,
        if any."""
        with (
            contextlib.ExitStack() as last
        ):  # every callback runs even if another raises: closing files on a full disk does
            last.callback(self.progress.close)
            last.callback(self._unlock)
            last.callback(self._remove_if_unused)
            if self._files is not None:
                last.callback(self._files.close)
            last.callback(self._background.shutdown)
            for tracker in self._trackers:
                last.callback(tracker.close, self._has_failed)
            self._write_row()
        self._raise_errors()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        self._has_failed = exc_type is not None
        self.close()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextlib.contextmanager
    def _unlocked_if_failed(self) -> Iterator[None]:
        """Unlock the folder if the body raises: nobody closes this run then, and this process may try again.

        Raises: ValueError for a folder that cannot be written."""
        try:
            yield
        except BaseException as error:
            self._has_failed = True
            self._remove_if_unused()
            self._unlock()
            if isinstance(error, WriteError):
                raise ValueError(f"--save ({self.folder}): {error}") from error
            raise

    def _remove_if_unused(self) -> None:
        """If the run failed before its first record, remove the files that it created: they would block a new
        attempt."""
        metrics, rollouts = self.folder / METRICS, self.folder / ROLLOUTS
        with contextlib.suppress(OSError):
            if metrics.exists() and metrics.stat().st_size or rollouts.exists() and any(rollouts.iterdir()):
                return
        for path in self._created if self._has_failed else ():
            with contextlib.suppress(OSError):  # a folder with files of others stays
                remove = shutil.rmtree if path.parent == self.folder else Path.rmdir
                remove(path) if path.is_dir() else path.unlink()

    def _write_row(self) -> None:
        if self._row is None:
            return
        (step, row), now = self._row, time.time()
        self._written_row, self._row = self._row, None
        self.attempt.check(f"the metrics of step {step}")
        self._lines.log_metrics(step, row, now)  # on the disk before the next step begins
        self._log_to_trackers("log_metrics", step, row, now)

    def _log_to_trackers(self, method: str, step: int, *args: object) -> None:
        for tracker in self._trackers:
            tracker.write(method, step, *args)

    def _log_rollouts(
        self, step: int, rows: Sequence[Mapping[str, object]], purpose: Literal["train", "eval"]
    ) -> None:
        self.attempt.check(f"the samples of step {step}")
        self._write(lambda: self._lines.log_rollouts(step, rows, purpose))
        self._log_to_trackers("log_rollouts", step, rows, purpose)

    @property
    def attempt(self) -> Attempt:
        """This process's attempt at the run. The folder must be open."""
        assert self._attempt is not None, "the run folder is not open yet: see `go_on_after`"
        return self._attempt

    @property
    def is_superseded(self) -> bool:
        """Whether a later attempt has taken the folder over, so that this one must not write there."""
        return self._attempt is not None and not self._attempt.is_current()

    @property
    def _lines(self) -> JsonLines:
        assert self._files is not None, "the run folder is not open yet: see `go_on_after`"
        return self._files

    def _write(self, write: Callable[[], object]) -> None:
        self._raise_errors()
        self._writes.append(self._background.submit(write))

    def _raise_errors(self) -> None:
        finished = [w for w in self._writes if w.done()]
        self._writes = [w for w in self._writes if not w.done()]
        for write in finished:
            write.result()
