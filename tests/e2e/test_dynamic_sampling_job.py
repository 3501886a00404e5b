"""Whole jobs with dynamic sampling, in which most prompts have equal rewards.

pytest tests/e2e/test_dynamic_sampling_job.py               a job and one that resumes it, 20 s
pytest tests/e2e/test_dynamic_sampling_job.py -m nightly    other engines, episodes, rewards that always differ"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.jobs import train
from tests.e2e.test_episodes_job import FLAGS as EPISODES
from tests.e2e.test_resume import check_equal, exported, halves, rows

REWARD = str(Path(__file__).with_name("reward.py"))
OFTEN_EQUAL = ("--reward-function", f"{REWARD}:often_equal")
NEVER_EQUAL = ("--reward-function", f"{REWARD}:never_equal")
LOG_ALL = ("--num-rollouts-to-log", "-1")


def logged(job, step):
    lines = (job.folder / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def check_steps(job):
    """Every step has its four prompts, each with different rewards; all others are counted."""
    for metrics in job.steps:
        of_row = {}
        for row in logged(job, metrics["step"]):
            of_row.setdefault(row["row"], []).append(row["reward"])
        assert [len(rewards) for rewards in of_row.values()] == [4] * 4
        assert all(len(set(rewards)) > 1 for rewards in of_row.values())
        counts = {
            name.removeprefix("dynamic_sampling/"): int(value)
            for name, value in metrics.items()
            if name.startswith("dynamic_sampling/") and not name.endswith("mean")
        }
        assert counts["groups"] - counts["dropped"] - counts["left_over"] == 4
        assert counts["rounds"] > 1 or not counts["dropped"]
        rewards = [reward for of_one in of_row.values() for reward in of_one]
        assert metrics["reward/mean"] == pytest.approx(sum(rewards) / 16)
        assert metrics["advantage/max_abs"] > 0 and metrics["mismatch/max_abs"] <= 1e-4


def test_steps_are_full_and_a_resumed_job_makes_the_same(sums_data, sums_paths, tmp_path):
    flags = ("--dynamic-sampling", *OFTEN_EQUAL, *LOG_ALL)
    # of these rows some are left over in step 3
    flags += ("--train-data", sums_paths["train"])
    whole, half = halves(sums_data, tmp_path, *flags, steps=6)
    check_steps(whole)
    assert sum(row["dynamic_sampling/dropped"] for row in whole.steps) > 12
    state = json.loads((whole.folder / "checkpoints" / "step_000003" / "job.json").read_text())
    assert '"given_rows": [' in json.dumps(state)  # the checkpoint has rows that come first
    check_equal(whole, half, after=3)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flags",
    [
        ("--actor-ranks", "0", "--rollout-ranks", "1"),
        ("--tensor-model-parallel-size", "2", "--rollout-backend", "transformers"),
        ("--kl-mode", "loss", "--kl-coef", "0.05", "--num-epochs", "2"),
    ],
)
def test_other_jobs_too(sums_data, tmp_path, flags):
    whole, half = halves(sums_data, tmp_path, "--dynamic-sampling", *OFTEN_EQUAL, *LOG_ALL, *flags, steps=6)
    check_steps(whole)
    check_equal(whole, half, after=3)


@pytest.mark.nightly
def test_episodes(sums_data, tmp_path):
    job = train(sums_data, tmp_path / "run", *EPISODES, "--dynamic-sampling", "--turn-rewards")
    assert job.returncode == 0, job.output
    for metrics in job.steps:
        groups = metrics["dynamic_sampling/groups"] - metrics["dynamic_sampling/left_over"]
        assert groups - metrics["dynamic_sampling/dropped"] == 4


@pytest.mark.nightly
def test_it_changes_nothing_where_rewards_always_differ(sums_data, tmp_path):
    plain = train(sums_data, tmp_path / "plain", *NEVER_EQUAL)
    with_it = train(sums_data, tmp_path / "dynamic", *NEVER_EQUAL, "--dynamic-sampling")
    assert plain.returncode == 0 and with_it.returncode == 0, plain.output + with_it.output
    without = [
        {name: value for name, value in row.items() if not name.startswith("dynamic_sampling/")}
        for row in rows(with_it)
    ]
    assert without == rows(plain) and exported(with_it) == exported(plain)
    assert all(row["dynamic_sampling/rounds"] == 1 for row in with_it.steps)


@pytest.mark.nightly
def test_a_job_without_prompts_to_learn_from_ends_with_the_flag(sums_data, tmp_path):
    equal = tmp_path / "equal.py"
    equal.write_text("def one(**sample):\n    return 1.0\n")
    flags = ("--dynamic-sampling", "--max-sampling-rounds", "3", "--reward-function", f"{equal}:one")
    job = train(sums_data, tmp_path / "run", *flags)
    assert job.returncode != 0
    assert "--max-sampling-rounds (3): step 1 needs 4 prompts" in job.output
    assert "12 prompts were sampled, their mean reward 1" in job.output
