"""A whole job whose rows rest by their rewards, and one that resumes it.

pytest tests/e2e/test_curriculum_job.py -m nightly"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.jobs import train
from tests.e2e.test_resume import check_equal, halves

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
REWARD = ("--reward-function", f"{Path(__file__).with_name('reward.py')}:often_equal")
FLAGS = ("--difficulty-max", "1", "--curriculum", "hard-first", *REWARD, "--num-rollouts-to-log", "-1")


@pytest.fixture
def few_rows(sums_data, tmp_path):
    """Ten rows of the training data, so that a run of four prompts a step makes passes."""
    path = tmp_path / "few.jsonl"
    path.write_text("".join((sums_data / "train.jsonl").read_text().splitlines(keepends=True)[:10]))
    return ("--train-data", str(path))


def rows_of(job, step):
    """Row -> rewards of its samples in a step, in the order of the samples."""
    found: dict[int, list[float]] = {}
    for line in (job.folder / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["row"], []).append(row["reward"])
    return found


def test_rows_with_equal_rewards_of_1_rest_for_a_pass(sums_data, tmp_path, few_rows):
    """`often_equal` gives 1 to every answer of two of three rows: they come in every second pass."""
    whole, half = halves(sums_data, tmp_path, *FLAGS, *few_rows, steps=6)
    visits = [row for step in range(1, 7) for row in rows_of(whole, step)]
    solved = {
        row for step in range(1, 4) for row, rewards in rows_of(whole, step).items() if set(rewards) == {1.0}
    }
    assert sorted(visits[:10]) == list(range(10)) and 3 < len(solved) < 10
    second = visits[10 : 10 + 10 - len(solved & set(visits[:8]))]
    assert not set(second) & solved & set(visits[:8]), "what the first two steps have measured rests"
    assert [row["curriculum/resting"] for row in whole.steps][-1] >= 0
    assert any(row["curriculum/resting"] > 2 for row in whole.steps)
    assert whole.steps[-1]["curriculum/measured"] == 10
    check_equal(whole, half, after=3)


def test_with_staleness_and_dynamic_sampling(sums_data, tmp_path, few_rows):
    for name, flags in {"stale": ("--staleness", "1"), "refill": ("--dynamic-sampling",)}.items():
        job = train(sums_data, tmp_path / name, *FLAGS, *few_rows, *flags)
        assert job.returncode == 0, job.output
        assert job.steps[-1]["curriculum/measured"] > 4
