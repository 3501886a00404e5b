"""The comparison of two recordings is silent on equal ones and finds one changed bit.

pytest tests/tools/test_compare_metrics.py"""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest

from tests.launch import run

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "compare_metrics.py"
ROWS = [
    {"step": 0, "eval/accuracy": 0.28},
    {"step": 1, "policy/loss": 0.1234567, "grad_norm/actor": 1.7, "time/step_s": 0.3, "time_2/step_s": 0.3},
]


def write(folder: Path, rows: list[dict]) -> Path:
    run = folder / "dp2" / "grpo"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def compare(old: Path, new: Path, *flags: str) -> subprocess.CompletedProcess:
    return run(SCRIPT, "compare", old, new, *flags, timeout=60)


def test_equal_recordings_give_no_line(tmp_path: Path) -> None:
    later = [ROWS[0], ROWS[1] | {"time/step_s": 0.9, "time_2/step_s": 0.8}]
    found = compare(write(tmp_path / "old", ROWS), write(tmp_path / "new", later))
    assert (found.returncode, found.stdout) == (0, "")


CHANGES = {
    "one bit of a float": [ROWS[0], ROWS[1] | {"policy/loss": math.nextafter(0.1234567, 1)}],
    "a metric is missing": [
        ROWS[0],
        {name: value for name, value in ROWS[1].items() if name != "grad_norm/actor"},
    ],
    "a metric is new": [ROWS[0], ROWS[1] | {"policy/new": 0.0}],
    "a row is missing": ROWS[:1],
    "nan instead of a number": [ROWS[0], ROWS[1] | {"policy/loss": None}],
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_found(tmp_path: Path, change: str) -> None:
    found = compare(write(tmp_path / "old", ROWS), write(tmp_path / "new", CHANGES[change]))
    assert found.returncode == 1
    assert len(found.stdout.splitlines()) == 1


def test_a_renamed_metric_is_compared_under_its_new_name(tmp_path: Path) -> None:
    new = [
        ROWS[0],
        {name.replace("grad_norm/actor", "grad_norm/policy"): value for name, value in ROWS[1].items()},
    ]
    old, new = write(tmp_path / "old", ROWS), write(tmp_path / "new", new)
    assert compare(old, new).returncode == 1
    assert compare(old, new, "--renamed", "grad_norm/actor=grad_norm/policy").returncode == 0


def test_a_missing_run_is_found(tmp_path: Path) -> None:
    old, new = write(tmp_path / "old", ROWS), write(tmp_path / "new", ROWS)
    write(old / "more", ROWS)
    found = compare(old, new)
    assert found.returncode == 1 and "only in" in found.stdout
