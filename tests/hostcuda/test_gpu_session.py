"""The script for the first GPU runs on the emulated device, and its summary says what ran.

make test-hostcuda ARGS=tests/hostcuda/test_gpu_session.py"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def session(out: Path, *parts: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHON": sys.executable, "MEGARL_GPU_REHEARSAL": "hostcuda"} | environment
    command = ["bash", ROOT / "tools" / "gpu_session.sh", out, "", *parts]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=variables)


def test_the_summary_says_what_ran_and_what_was_skipped(tmp_path):
    """`make test-hostcuda` runs the tests of the parts `tests` and `two_gpus` by themselves."""
    done = session(tmp_path, "bench_step", "bench_kernels", "sanitizer")
    summary = json.loads((tmp_path / "summary.json").read_text())
    results = {name: part["result"] for name, part in summary["parts"].items()}
    assert results == {"bench_step": "passed", "bench_kernels": "skipped", "sanitizer": "skipped"}, (
        done.stdout
    )
    machine = summary["machine"]
    assert machine["rehearsal"] == "hostcuda" and set(machine["gpus"]) == {"hostcuda"}
    assert json.loads((tmp_path / "bench_step.json").read_text())["device"] == "hostcuda"


def test_a_part_that_fails_is_recorded_and_the_next_one_runs(tmp_path):
    (tmp_path / "bench_step.json").mkdir()  # where the part writes its numbers
    session(tmp_path, "bench_step", "sanitizer")
    parts = json.loads((tmp_path / "summary.json").read_text())["parts"]
    assert [(name, part["result"]) for name, part in parts.items()] == [
        ("bench_step", "failed"),
        ("sanitizer", "skipped"),
    ]
    assert parts["bench_step"]["exit"] == 1 and "bench_step.json" in parts["bench_step"]["says"]


def test_another_kind_of_rehearsal_is_refused(tmp_path):
    done = session(tmp_path, "sanitizer", MEGARL_GPU_REHEARSAL="gpu")
    assert done.returncode == 2 and "must be cpu or hostcuda" in done.stderr
