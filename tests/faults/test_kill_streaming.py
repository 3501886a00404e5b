"""An asynchronous job that is killed at random times, again and again, and started again with the same command,
trains on every prompt exactly once: none is lost, none comes twice, no token is too old."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from os import kill
from pathlib import Path

import pytest

from tests.e2e.jobs import COMMON, replace_flags
from tests.faults.harness import START_WITHIN_S, Job, megarl

STALENESS, NUM_PROMPTS, NUM_SAMPLES = 2, 4, 4  # the last two as in COMMON
VICTIMS = ("rank 0", "rank 1", "driver")


def command(data: Path, save: Path, num_steps: int, *flags: str) -> list[str]:
    files = ["--model", str(data / "model"), "--train-data", str(data / "train.jsonl")]
    folders = ["--save", str(save), "--load", str(save), "--save-interval", "1"]
    ours = ["--staleness", str(STALENESS), "--train-iters", str(num_steps), "--num-rollouts-to-log", "-1"]
    return megarl("train", replace_flags([*COMMON, *files, *folders], [*ours, *flags]))


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill_some_time(job: Job, save: Path, random_: random.Random) -> None:
    """Kill a random process of the job when it has made up to three further steps."""
    wanted = len(rows(save / "metrics.jsonl")) + random_.randint(1, 3)
    deadline = time.time() + START_WITHIN_S
    while len(rows(save / "metrics.jsonl")) < wanted and job.launcher.poll() is None:
        assert time.time() < deadline, job.stderr()
        time.sleep(0.02)
    time.sleep(random_.uniform(0.0, 0.3))
    if job.launcher.poll() is None:
        kill(job.find(random_.choice(VICTIMS)), signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "num_kills, flags",
    [(20, ("--rollout-backend", "transformers")), (5, ("--weight-update", "keep"))],
    ids=["transformers", "vllm"],
)
def test_every_prompt_is_trained_on_once(sums_data, tmp_path, num_kills, flags):
    random_, save, num_steps = random.Random(7), tmp_path / "run", 4 * num_kills
    started_again = command(sums_data, save, num_steps, *flags)
    for _ in range(num_kills):
        job = Job(tmp_path, started_again)
        try:
            kill_some_time(job, save, random_)
            job.launcher.wait(60)
        finally:
            job.end()
    job = Job(tmp_path, started_again)
    try:
        assert job.launcher.wait(600) == 0, job.stderr()
    finally:
        job.end()
    steps = rows(save / "metrics.jsonl")
    assert [row["step"] for row in steps] == list(range(1, num_steps + 1))
    assert max(row["staleness/max"] for row in steps) <= STALENESS
    trained = [
        [row["sample_id"] for row in rows(save / "rollouts" / f"step_{step:06d}.jsonl")]
        for step in range(1, num_steps + 1)
    ]
    assert {len(samples) for samples in trained} == {NUM_PROMPTS * NUM_SAMPLES}
    count = Counter(sample for samples in trained for sample in samples)
    assert count == Counter(range(num_steps * NUM_PROMPTS * NUM_SAMPLES))
