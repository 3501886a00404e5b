"""The run folder: everything a run leaves behind.

resolved.args                the whole configuration; `megarl train @resolved.args --save elsewhere` runs it again
metrics.jsonl                one JSON object per step, written as the step ends
tensorboard/                 the same as event files
rollouts/step_000001.jsonl   sampled prompts, responses and rewards of a step
timeline.json                when each call of the last steps ran and on which ranks, for ui.perfetto.dev (written at the end)
rollouts/eval.jsonl          one held-out answer per evaluation
checkpoints/step_000010/     what a later job goes on from, see `driver/checkpoints.py`
hf/, hf_critic/              exported weights (written by actor and critic)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

from megarl.config.check_paths import free_name
from megarl.config.checkpoint_folders import goes_on
from megarl.config.schema import TrainConfig
from megarl.driver.events import EventFile
from megarl.driver.metrics import to_json_line
from megarl.driver.progress import Progress
from megarl.driver.run_history import cut_after

MARKS = ("resolved.args", "metrics.jsonl")
"""Files that make a folder a run's."""


def check_folder_is_free(save: str) -> None:
    """Raise ValueError if `save` holds a run, naming a folder that is free. Creates nothing."""
    folder = Path(save)
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"--save ({save}) is a file; it must be a folder that can be created. Try --save {free_name(folder)}."
        )
    if any((folder / mark).exists() for mark in MARKS):
        raise ValueError(
            f"--save ({save}) already holds a run, and no run overwrites another. Try --save {free_name(folder)}."
        )


def lock_folder(folder: Path) -> int:
    """Descriptor that keeps other jobs from this run until it is closed, or the process ends. Raises: ValueError if another has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"--save ({folder}): another job is running there. Wait for its end, or try --save {free_name(folder)}."
        ) from None
    except OSError:
        pass  # a file system without locks
    return descriptor


class Run:
    """Records one run. Metrics are written at once, the rest by one background thread, whose errors surface at the next call.

    Creates the folder, so make one only when everything else was checked; of a run that goes on in its own folder (--load) nothing is
    changed before `go_on_after`. Use as a context manager, or call `close`.

    Args:
        config: of the job.
        resolved_args: text of resolved.args.
        progress: where to show steps; default: on stdout.
    Raises: ValueError if the folder holds a run already, and --load does not say to go on there.
    """

    def __init__(self, config: TrainConfig, resolved_args: str, progress: Progress | None = None):
        self.folder, self._resolved_args = Path(config.run.save), resolved_args
        self._metrics_file: TextIO | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="run_folder")
        self._events: EventFile | None = None
        self._writes: list[Future] = []
        self._row: dict[str, float | int] | None = None  # of the step whose evaluation may still come
        self._written_row: dict[str, float | int] = {}
        self._step, self._step_start = 0, time.perf_counter()
        self._lock: int | None = None
        if not goes_on(config):
            check_folder_is_free(config.run.save)
            with self._unlocked_if_failed():
                self._open("x", None)  # "x": of two jobs that start at once, one gets the folder
        elif self.folder.exists():
            self._lock = lock_folder(self.folder)
        self.progress = Progress(config.batch.train_iters) if progress is None else progress

    def go_on_after(self, step: int) -> None:
        """Of a run that goes on in its own folder: remove what was recorded of later steps, and record from there on. 0: begin anew."""
        cut_after(self.folder, step)
        self._open("a", step + 1 if step else 0)

    def _open(self, mode: str, first_step: int | None) -> None:
        (self.folder / "rollouts").mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self.folder) if self._lock is None else self._lock
        with open(self.folder / "resolved.args", "x" if mode == "x" else "w", encoding="utf-8") as file:
            file.write(self._resolved_args)
        self._metrics_file = open(self.folder / "metrics.jsonl", mode, buffering=1, encoding="utf-8")
        self._write(self._open_events, first_step)

    def begin_step(self, step: int) -> None:
        """Starts the clock of time/step_s; writes the row of the step before."""
        self._write_row()
        self._step, self._step_start = step, time.perf_counter()

    def finish_step(self, step: int, metrics: Mapping[str, float | int], num_tokens: int) -> None:
        """Record the step's metrics, its wall time and tokens per second. `num_tokens`: prompt and response tokens trained on."""
        seconds = time.perf_counter() - self._step_start
        self._row = {
            "step": step,
            **metrics,
            "time/step_s": seconds,
            "throughput/tokens_per_s": num_tokens / seconds,
        }
        self.progress.update(step, self._row)

    def record_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """Add the scores to the row of `step` (step 0 has a row of its own), also to one that was written before it was evaluated."""
        self._row = {**(self._row or self._take_back(step)), **scores}
        self.progress.show_evaluation(step, scores)
        self._write_row()

    def _take_back(self, step: int) -> dict[str, object]:
        """The last row of metrics.jsonl, out of the file, if it is of this step; else an empty one."""
        path = self.folder / "metrics.jsonl"
        last = (path.read_bytes().splitlines(keepends=True) or [b"{}"])[-1]
        row = json.loads(last)
        if row.get("step") != step:
            return {"step": step}
        os.truncate(path, path.stat().st_size - len(last))
        self._metrics_file.seek(0, os.SEEK_END)  # a new run's file was not opened to append
        return row | {name: float(value) for name, value in row.pop("nonfinite", {}).items()}

    def row_of(self, step: int) -> dict[str, float | int]:
        """What metrics.jsonl has of this step, which is the last one; written if it was not yet. {} if nothing was recorded."""
        self._write_row()
        return self._written_row if self._written_row.get("step") == step else {}

    def write_rollouts(self, rows: Iterable[Mapping[str, object]]) -> None:
        """rollouts/step_<step>.jsonl: samples of the current step. No file if there are none."""
        if rows := list(rows):
            self._write(_append_lines, self.folder / "rollouts" / f"step_{self._step:06d}.jsonl", rows)

    def keep_answer(self, step: int, name: str, record: Mapping[str, object]) -> None:
        """Append one evaluation sample to rollouts/eval.jsonl; `name` is the metric it belongs to."""
        self._write(
            _append_lines, self.folder / "rollouts" / "eval.jsonl", [{"step": step, "name": name, **record}]
        )

    def close(self) -> None:
        """Write everything that was recorded. Raises the first error of the background thread."""
        with (
            contextlib.ExitStack() as last
        ):  # each of these also after an error of another: on a full disk closing a file fails too
            last.callback(self.progress.close)
            last.callback(self._unlock)
            if self._metrics_file is not None:
                last.callback(self._metrics_file.close)
            last.callback(self._background.shutdown)
            self._write_row()
            self._write(self._close_events)
        self._raise_errors()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextlib.contextmanager
    def _unlocked_if_failed(self) -> Iterator[None]:
        """Nobody will close this run then, and the next attempt may be of this process."""
        try:
            yield
        except BaseException:
            self._unlock()
            raise

    def _write_row(self) -> None:
        if self._row is not None:
            row = self._written_row = self._row
            self._row = None
            self._metrics_file.write(to_json_line(row) + "\n")
            self._write(self._add_events, row, time.time())

    def _write(self, write: Callable[..., None], *args: object) -> None:
        self._raise_errors()
        self._writes.append(self._background.submit(write, *args))

    def _raise_errors(self) -> None:
        finished = [w for w in self._writes if w.done()]
        self._writes = [w for w in self._writes if not w.done()]
        for write in finished:
            write.result()

    # On the background thread.

    def _open_events(self, first_step: int | None) -> None:
        self._events = EventFile(self.folder / "tensorboard", first_step)

    def _add_events(self, row: dict[str, float | int], wall_time: float) -> None:
        step = int(row["step"])
        self._events.add_scalars(
            step, {name: value for name, value in row.items() if name != "step"}, wall_time
        )

    def _close_events(self) -> None:
        if self._events is not None:
            self._events.close()


def _append_lines(path: os.PathLike, rows: list[Mapping[str, object]]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
