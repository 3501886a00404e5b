"""Resident memory does not grow with steps and checkpoints: driver, ranks and engines together, after 200
steps and 20 checkpoints against after 10 steps and one.

    pytest tests/e2e/test_memory.py -m nightly -s        4 min"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.jobs import COMMON, replace_flags

SAMPLED = (10, 20, 50, 100, 150, 200)


def descendants(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from descendants(int(child))


def resident_kib(pid: int) -> int:
    """Of a process and all that it started, pages that several share counted once. Without pages of files:
    how much of a library is counted depends on who else on the machine has loaded it."""
    rollups = [Path(f"/proc/{each}/smaps_rollup").read_text() for each in descendants(pid)]
    return sum(
        int(line.split()[1])
        for rollup in rollups
        for line in rollup.splitlines()
        if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
    )


def curve(data: Path, save: Path, *flags: str) -> dict[int, int]:
    """Step -> KiB resident just after it. The job is ended after the last."""
    arguments = replace_flags(
        [
            *COMMON,
            "--model",
            str(data / "model"),
            "--train-data",
            str(data / "train.jsonl"),
            "--save",
            str(save),
        ],
        ["--train-iters", str(SAMPLED[-1] + 2), *flags],
    )
    found: dict[int, int] = {}
    with open(save.parent / "log", "w+") as log:
        job = subprocess.Popen(
            [sys.executable, "-m", "megarl.cli", "train", *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=save.parent,
            env=dict(os.environ, PYTHONSAFEPATH="1"),
        )
        try:
            while job.poll() is None:
                lines = (
                    (save / "metrics.jsonl").read_text().count("\n")
                    if (save / "metrics.jsonl").exists()
                    else 0
                )
                if due := [step for step in SAMPLED if step not in found and lines >= step]:
                    found[due[0]] = resident_kib(job.pid)
                time.sleep(0.05)
        finally:
            job.kill()
            job.wait()
        log.seek(0)
        assert job.returncode == 0, log.read()[-4000:]
    return found


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_two_hundred_steps_and_twenty_checkpoints_take_no_more_memory_than_ten_and_one(sums_data, tmp_path):
    found = curve(sums_data, tmp_path / "run", "--save-interval", "10")
    print("\n" + "  ".join(f"step {step}: {kib / 1024:.0f} MiB" for step, kib in found.items()))
    assert [*found] == [*SAMPLED]
    assert found[SAMPLED[-1]] <= 1.05 * found[SAMPLED[0]]
