"""Greedy answers that are scored and not trained on, in whole jobs of ReMax.

pytest tests/e2e/test_untrained_samples.py -m nightly"""

from __future__ import annotations

import json

import pytest

from tests.e2e.jobs import Job, train

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
FLAGS = "--algorithm remax --train-iters 3 --num-rollouts-to-log -1"
JOBS = {
    "synchronous": "",
    "asynchronous": "--staleness 1",
}


@pytest.fixture(scope="module", params=["synchronous", "asynchronous"])
def job(request, sums_data, tmp_path_factory) -> Job:
    folder = tmp_path_factory.mktemp("untrained") / "run"
    found = train(sums_data, folder, *f"{FLAGS} {JOBS[request.param]}".split())
    assert found.returncode == 0, found.output
    return found


def rows_of(job: Job, step: int) -> list[dict]:
    lines = (job.folder / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_prompt_has_one_greedy_answer_more(job):
    """4 prompts with 4 sampled answers each: sample ids are multiples of 5 and those between."""
    for row in job.steps:
        logged = rows_of(job, row["step"])
        greedy = [one for one in logged if not one.get("trained", True)]
        assert len(logged) == 20 and len(greedy) == 4 == row["untrained/samples"]
        assert all(one["sample_id"] % 5 == 4 for one in greedy)
        assert row["untrained/tokens"] == sum(one["response_length"] for one in greedy)
        assert row["untrained/reward_mean"] == pytest.approx(sum(one["reward"] for one in greedy) / 4)
        sampled = [one["reward"] for one in logged if one.get("trained", True)]
        assert row["reward/mean"] == pytest.approx(sum(sampled) / 16)
        tokens = sum(one["response_length"] for one in logged if one.get("trained", True))
        compared = row.get("mismatch/tokens", 0) + row.get("off_policy/tokens", 0)
        assert compared in (tokens, tokens + row.get("canary/tokens", 0))
        assert row.get("mismatch/max_abs", 0.0) <= 1e-4  # at temperature 0.9; greedy answers have another


def test_the_advantages_are_those_of_the_formula(job):
    """The largest advantage of the first step, by the rewards that were logged."""
    logged, row = rows_of(job, 1), job.steps[0]
    greedy = {one["sample_id"] // 5: one["reward"] for one in logged if not one.get("trained", True)}
    largest = max(abs(one["reward"] - greedy[one["sample_id"] // 5]) for one in logged)
    assert row["advantage/max_abs"] == pytest.approx(largest, rel=1e-6) and largest > 0
