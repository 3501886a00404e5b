"""Whole jobs whose engines answer prompts of later steps while a step trains: each prompt is trained on
once, no token is too old, and a checkpoint loses nothing.

pytest tests/e2e/test_streaming.py             GRPO with --staleness 1 on two engines, resumed on one
pytest tests/e2e/test_streaming.py -m nightly     PPO, other layouts and engines, faults, SIGTERM"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.jobs import LAYOUTS, Job, train
from tests.e2e.test_cli_jobs import processes, wait_until
from tests.e2e.test_resume import TWO, check_equal
from tests.e2e.test_stopping import SlowJob

NUM_PROMPTS, NUM_SAMPLES = 4, 4  # as in COMMON
LOG_ALL = ("--num-rollouts-to-log", "-1")
LIMIT = 1e-3  # of the log-probs of engine and trainer in fp32, as the gate's


def stream(data: Path, save: Path, staleness: int, steps: int, *flags: str, **options) -> Job:
    job = train(
        data,
        save,
        *("--staleness", str(staleness), "--train-iters", str(steps), *LOG_ALL, *flags),
        **options,
    )
    assert job.returncode == 0, job.output
    return job


def trained_visits(run: Path, suffix: str = "") -> dict[int, list[int]]:
    """Return step -> visits that it has trained on. Each must have come with all of its samples."""
    visits = {}
    for path in sorted((run / f"rollouts{suffix}").glob("step_*.jsonl")):
        ids = [json.loads(line)["sample_id"] for line in path.read_text().splitlines()]
        groups = Counter(sample // NUM_SAMPLES for sample in ids)
        assert len({*ids}) == len(ids) and {*groups.values()} == {NUM_SAMPLES}, path
        visits[int(path.stem.removeprefix("step_"))] = sorted(groups)
    return visits


def check_run(job: Job, first: int, last: int, staleness: int) -> None:
    """Check the ages of tokens, and that the gate has compared engine and trainer."""
    assert [row["step"] for row in job.steps] == [*range(first, last + 1)]
    for row in job.steps:
        assert 0 <= row["staleness/max"] <= staleness
        shares = [row[f"staleness/share_{age}"] for age in range(staleness + 1)]
        assert sum(shares) == pytest.approx(1.0)
        assert row.get("mismatch/max_abs", 0.0) <= LIMIT, row
        assert row["canary/tokens"] > 0 and row["canary/max_abs"] <= LIMIT
    assert any("mismatch/max_abs" in row for row in job.steps)
    assert max(row["staleness/max"] for row in job.steps) > 0


def check_once(*runs: dict[int, list[int]], steps: int) -> None:
    """Check that the steps of these runs, taken together, train on each visit once."""
    assert sorted(step for run in runs for step in run) == [*range(1, steps + 1)]
    of_steps = [visits for run in runs for visits in run.values()]
    assert {len(visits) for visits in of_steps} == {NUM_PROMPTS}
    assert sorted(sum(of_steps, [])) == [*range(steps * NUM_PROMPTS)]


def check_halves(whole: Job, half: Job, middle: int, steps: int) -> None:
    before = {step: visits for step, visits in trained_visits(whole.folder).items() if step <= middle}
    assert before.keys() == {*range(1, middle + 1)}
    check_once(trained_visits(whole.folder), steps=steps)
    check_once(before, trained_visits(half.folder), steps=steps)


def test_a_job_at_staleness_1_and_its_checkpoint_on_one_engine(sums_data, tmp_path):
    evaluation = ("--eval-data", str(sums_data / "test.parquet"), "--eval-interval", "2")
    flags = ("--save-interval", "2", *evaluation, "--eval-num-prompts", "8")
    whole = stream(sums_data, tmp_path / "whole", 1, 4, *flags)
    check_run(whole, 1, 4, staleness=1)
    evaluated = {row["step"]: row["eval/reward"] for row in whole.metrics if "eval/reward" in row}
    assert [*evaluated] == [0, 2, 4] and all(0.0 <= mean <= 1.0 for mean in evaluated.values())
    middle, last = (whole.folder / "checkpoints" / f"step_00000{step}" for step in (2, 4))
    assert {path.name for path in (middle / "requests").iterdir()} == {
        f"rollout_engine_{engine}.msgpack" for engine in (0, 1)
    }
    assert not (last / "requests").exists()  # nothing is admitted beyond the last step
    half = stream(sums_data, tmp_path / "half", 1, 4, "--load", str(middle), "--nproc-per-node", "1")
    assert "continues after step 2: " in half.output
    check_halves(whole, half, 2, 4)
    assert [row["step"] for row in half.steps] == [3, 4]
    assert max(row["staleness/max"] for row in half.steps) <= 1


PPO = ("--algorithm", "ppo", "--critic-lr", "1e-2", "--critic-warmup-iters", "2")


@pytest.mark.nightly
def test_ppo_counts_the_steps_of_the_critics_warm_up_as_versions(sums_data, tmp_path):
    job = stream(sums_data, tmp_path / "run", 2, 6, *PPO, "--weight-update", "keep")
    check_run(job, 1, 6, staleness=2)
    check_once(trained_visits(job.folder), steps=6)
    warm_up = job.steps[:3]  # versions 0, 1 and 2 are the same weights
    assert warm_up[0]["staleness/max"] == 0 and max(row["staleness/max"] for row in warm_up) > 0
    gaps = [row["off_policy/max_abs"] for row in warm_up if "off_policy/max_abs" in row]
    assert gaps and max(gaps) <= LIMIT  # older in number only
    later = [row["off_policy/max_abs"] for row in job.steps[3:] if "off_policy/max_abs" in row]
    assert later and max(later) > LIMIT


FORMS = {
    "disjoint": ("--actor-ranks", "0", "--rollout-ranks", "1"),
    "tp2": LAYOUTS["tp2_to_tp2"],
    "pp2": LAYOUTS["pp2_to_tp1"],
    "cp2": ("--context-parallel-size", "2"),
    "one_engine_of_two": LAYOUTS["dp2_to_tp2"],
    "keep": ("--weight-update", "keep"),
    "wait": ("--weight-update", "wait"),
    "in_order": ("--rollout-order", "in-order"),
    "copied": ("--no-reshard-alias",),
    "transformers": ("--rollout-backend", "transformers"),
    "transformers_disjoint": LAYOUTS["rank_0_to_transformers_on_1"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
def test_other_forms_train_each_prompt_once_and_go_on_in_the_plain_one(sums_data, tmp_path, form):
    whole = stream(sums_data, tmp_path / "whole", 1, 4, "--save-interval", "2", *FORMS[form])
    check_run(whole, 1, 4, staleness=1)
    checkpoint = whole.folder / "checkpoints" / "step_000002"
    half = stream(sums_data, tmp_path / "half", 1, 4, "--load", str(checkpoint))
    check_halves(whole, half, 2, 4)


@pytest.mark.nightly
def test_a_checkpoint_of_one_engine_goes_on_with_two(sums_data, tmp_path):
    one = ("--nproc-per-node", "1")
    whole = stream(sums_data, tmp_path / "whole", 2, 4, "--save-interval", "2", *one)
    checkpoint = whole.folder / "checkpoints" / "step_000002"
    check_halves(whole, stream(sums_data, tmp_path / "half", 2, 4, "--load", str(checkpoint)), 2, 4)


@pytest.mark.nightly
def test_two_actors_stream_beside_each_other(sums_data, tmp_path):
    job = stream(sums_data, tmp_path / "run", 1, 4, *TWO)
    for suffix in ("", "_2"):
        assert max(row[f"staleness{suffix}/max"] for row in job.steps) == 1
    for path in (job.folder / "rollouts").iterdir():
        assert path.read_text()


@pytest.mark.nightly
def test_a_checkpoint_in_one_process_continues_bit_for_bit(sums_data, tmp_path):
    """The driver of one process takes exactly the engine's steps that it waits for."""
    inline = ("--nproc-per-node", "1", "--executor", "inline")
    whole = stream(sums_data, tmp_path / "whole", 1, 4, "--save-interval", "2", *inline)
    checkpoint = whole.folder / "checkpoints" / "step_000002"
    half = stream(sums_data, tmp_path / "half", 1, 4, "--load", str(checkpoint), *inline)
    check_halves(whole, half, 2, 4)
    check_equal(whole, half)


@pytest.mark.nightly
def test_a_failing_engine_step_names_the_role_and_the_step(sums_data, tmp_path):
    job = train(sums_data, tmp_path / "run", "--staleness", "1", fault="engine_step_fails")
    assert job.returncode != 0
    found = re.search(
        r"\[rollout rank (\d)\] generate failed at step (\d): RuntimeError: planted", job.output
    )
    assert found and int(found[2]) in (1, 2), job.output


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["recompute", "wait"])
def test_sigterm_between_engine_steps_loses_no_prompt(sums_data, tmp_path, how):
    flags = ("--staleness", "1", "--weight-update", how, *LOG_ALL)
    job = SlowJob(sums_data, tmp_path, *flags)
    try:
        os.killpg(job.process.pid, signal.SIGTERM)
        assert job.process.wait(60) == 143, job.output()
        wait_until(lambda: not processes(job.mark), 10)
    finally:
        job.end()
    run = tmp_path / "run"
    (checkpoint,) = (run / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step_"))
    assert f"its checkpoint is {checkpoint}" in job.output()
    before = trained_visits(run)
    assert [*before] == [*range(1, step + 1)] and 2 <= step < 5
    resumed = stream(sums_data, run, 1, 5, "--weight-update", how, "--load", str(run))
    assert f"continues after step {step}: " in resumed.output
    check_once(trained_visits(run), steps=5)
