"""Write the files that every run has: metrics.jsonl, rollouts/step_<step>.jsonl and rollouts/eval.jsonl. A
resumed run reads them."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Literal

from megarl.files.writing import writing
from megarl.loggers.base import Metrics, Purpose, Samples

METRICS = "metrics.jsonl"
ENGINES = "engines"
"""Folder with what the driver and each engine of an asynchronous run did; see
megarl/rollout/replay_log.py."""
FAILED_STEP = "failed_step.jsonl"
"""File of the run folder with the samples of the last step that failed. Nothing resumes from it."""
_ROLLOUTS = re.compile(r"step_(\d+)\.jsonl")


class JsonLines:
    """Writes the files of one run folder. Every call leaves complete lines on the disk.

    Args:
        mode: of metrics.jsonl; "x" for a new run, "a" for one that is resumed."""

    def __init__(self, folder: Path, mode: Literal["x", "a"]) -> None:
        self._metrics, self._rollouts = folder / METRICS, folder / "rollouts"
        with writing(self._metrics):
            self._file = open(self._metrics, mode, buffering=1, encoding="utf-8")

    def log_config(self, arguments: str) -> None:
        """Do nothing: resolved.args, which marks a folder as a run's, is already written."""

    def log_metrics(self, step: int, metrics: Metrics, wall_time: float) -> None:
        with writing(self._metrics):
            self._file.write(to_json_line({"step": step, **metrics}) + "\n")

    def log_rollouts(self, step: int, samples: Samples, purpose: Purpose) -> None:
        path = self._rollouts / ("eval.jsonl" if purpose == "eval" else f"step_{step:06d}.jsonl")
        first = {"step": step} if purpose == "eval" else {}
        with writing(path), open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps({**first, **sample}, ensure_ascii=False) + "\n" for sample in samples)

    def take_back(self, step: int) -> dict[str, float]:
        """Remove the last row of metrics.jsonl if it belongs to this step. Returns its metrics, or {}."""
        last = (self._metrics.read_bytes().splitlines(keepends=True) or [b"{}"])[-1]
        if json.loads(last).get("step") != step:
            return {}
        os.truncate(self._metrics, self._metrics.stat().st_size - len(last))
        self._file.seek(0, os.SEEK_END)  # a new run's file was not opened to append
        return _metrics_of(last)

    def add_to_row(self, step: int, metrics: Metrics) -> None:
        """Add metrics to the row of a step, which need not be the last one, or insert a row."""
        lines = self._metrics.read_bytes().splitlines(keepends=True)
        at = next((i for i in range(len(lines), 0, -1) if _step_of(lines[i - 1]) <= step), 0)
        row: dict[str, float] = {}
        if at and _step_of(lines[at - 1]) == step:
            at -= 1
            row = _metrics_of(lines.pop(at))
        lines.insert(at, (to_json_line({"step": step, **row, **metrics}) + "\n").encode())
        with writing(self._metrics), open(self._metrics, "r+b") as file:
            file.seek(sum(map(len, lines[:at])))  # what is written is longer than what was there
            file.write(b"".join(lines[at:]))
        self._file.seek(0, os.SEEK_END)

    def read_rows(self, steps: Container[int]) -> dict[int, dict[str, float]]:
        """Return step -> its metrics in metrics.jsonl, for these steps."""
        rows = ((_step_of(line), line) for line in self._metrics.read_bytes().splitlines(keepends=True))
        return {int(step): _metrics_of(line) for step, line in rows if step in steps}

    def close(self) -> None:
        with writing(self._metrics):
            self._file.close()


def _metrics_of(line: bytes) -> dict[str, float]:
    row = json.loads(line)
    row.pop("step")
    return row | {name: float(value) for name, value in row.pop("nonfinite", {}).items()}


def to_json_line(metrics: Mapping[str, float | int]) -> str:
    """Return metrics as one line of strict JSON, which every reader can parse.

    JSON has no NaN or infinity: such a value is null, and the extra key `nonfinite` maps its name to what it
    was ("nan", "inf", "-inf"), so that a run that diverges keeps its record."""
    nonfinite = {name: str(float(value)) for name, value in metrics.items() if not math.isfinite(value)}
    row: dict[str, object] = {name: None if name in nonfinite else value for name, value in metrics.items()}
    if nonfinite:
        row["nonfinite"] = nonfinite
    return json.dumps(row, allow_nan=False)


def cut_after(folder: Path, step: int) -> None:
    """Remove the records of steps after `step` from a run folder: rows, held-out answers, samples and the
    logs of driver and engines; -1 removes everything."""
    logs = (folder / ENGINES).glob("*.jsonl")
    for path in (folder / METRICS, folder / "rollouts" / "eval.jsonl", *logs):
        if path.exists():
            _keep_rows(path, step)
    for of_step, path in rollout_files(folder).items():
        if of_step > step:
            path.unlink()


def remove_engine_logs(folder: Path) -> None:
    """Remove the logs of driver and engines from a run folder."""
    for path in (folder / ENGINES).glob("*.jsonl"):
        path.unlink()


def moved_requests(folder: Path) -> Path:
    """Return the folder, inside a run folder, of the unfinished requests of engines that have ended or
    hang."""
    return folder / ENGINES / "moved"


def rollout_files(folder: Path) -> dict[int, Path]:
    """Return step -> file of the samples that a run has logged, by ascending step."""
    paths = (folder / "rollouts").glob("step_*.jsonl")
    found = {int(match[1]): path for path in paths if (match := _ROLLOUTS.fullmatch(path.name))}
    return dict(sorted(found.items()))


def _keep_rows(path: Path, last: int) -> None:
    """Rewrite a file with the rows of steps up to `last`, without a line that a killed job did not finish."""
    kept = [line for line in path.read_bytes().splitlines(keepends=True) if _step_of(line) <= last]
    new = path.with_name(f".{path.name}.new")
    with writing(path):
        try:
            new.write_bytes(b"".join(kept))
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)  # of a full disk


def _step_of(line: bytes) -> float:
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")
    return step if isinstance(step, int) else float("inf")
