"""Making a run folder what it was after an earlier step, for a run that goes on from there."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

_ROLLOUTS = re.compile(r"step_(\d+)\.jsonl")


def cut_after(folder: Path, step: int) -> None:
    """Remove rows of metrics.jsonl and held-out answers of later steps, and the samples of these; 0: of all, as the run begins anew."""
    for path in (folder / "metrics.jsonl", folder / "rollouts" / "eval.jsonl"):
        if path.exists():
            _keep_rows(path, step)
    for path in (folder / "rollouts").glob("step_*.jsonl"):
        if (match := _ROLLOUTS.fullmatch(path.name)) and int(match[1]) > step:
            path.unlink()


def _keep_rows(path: Path, last: int) -> None:
    """Of steps up to `last`, but for a line that a job did not write to its end."""
    kept = [
        line for line in path.read_bytes().splitlines(keepends=True) if last > 0 and _step_of(line) <= last
    ]
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(b"".join(kept))
    os.replace(new, path)


def _step_of(line: bytes) -> float:
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")
    return step if isinstance(step, int) else float("inf")
