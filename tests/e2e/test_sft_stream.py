"""Fine-tuning mixed into RL, in whole jobs: alone it is supervised fine-tuning, and it resumes where it was.

pytest tests/e2e/test_sft_stream.py -m nightly"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.jobs import Job, train

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
EQUAL = f"--reward-function {Path(__file__).parent}/reward.py:always_equal"
"""Rewards of 1 for every answer: GRPO's advantages are 0, so the rows are all that is learnt from."""
ROWS = "--no-shuffle --temperature 1 --global-batch-size 16"
STREAM = f"{ROWS} {EQUAL} --sft-data {{data}}/sft_worked.jsonl --sft-coef 1 --sft-batch-size 16"


def run(data: Path, folder: Path, flags: str) -> Job:
    job = train(data, folder, *flags.replace("{data}", str(data)).split())
    assert job.returncode == 0, job.output
    return job


@pytest.fixture(scope="module")
def whole(sums_data, tmp_path_factory) -> Job:
    """Four steps, with a checkpoint after the second."""
    folder = tmp_path_factory.mktemp("stream") / "whole"
    return run(sums_data, folder, f"{STREAM} --train-iters 4 --save-interval 2 --keep 2")


def test_alone_it_is_fine_tuning(whole, sums_data, tmp_path):
    """The same rows in the same order, with the same optimizer: to fp32's rounding, as other micro-batches
    are beside them. Both take 16 rows a step."""
    flags = f"--algorithm sft {ROWS} --train-data {sums_data}/sft_worked.jsonl --train-iters 4"
    job = train(sums_data, tmp_path / "sft", *flags.split())
    assert job.returncode == 0, job.output
    wanted = [row["policy/loss"] for row in job.metrics if "policy/loss" in row]
    found = [row["sft/loss"] for row in whole.steps]
    assert found == pytest.approx(wanted, rel=1e-5) and wanted[0] > wanted[-1]
    norms = [row["policy/grad_norm"] for row in job.metrics if "policy/grad_norm" in row]
    assert [row["policy/grad_norm"] for row in whole.steps] == pytest.approx(norms, rel=1e-4)
    assert all(row["advantage/max_abs"] == 0 and row["sft/tokens"] > 16 for row in whole.steps)


def test_it_goes_on_with_the_next_rows(whole, sums_data, tmp_path):
    """The steps after a resume are those of the run that was not interrupted, to the last bit."""
    start = whole.folder / "checkpoints" / "step_000002"
    job = run(sums_data, tmp_path / "resumed", f"{STREAM} --train-iters 4 --load {start}")
    assert [row["sft/loss"] for row in job.steps] == [row["sft/loss"] for row in whole.steps[2:]]


@pytest.mark.parametrize("flags", ["", "--teacher-top-k 4"])
def test_beside_a_teacher_that_does_not_read_the_rows(whole, sums_data, tmp_path, flags):
    """The teacher is the policy's own model, so that the first update is that of the rows alone."""
    gkd = f"--algorithm gkd --reference-model {sums_data}/model {flags}"
    job = run(sums_data, tmp_path / "gkd", f"{STREAM} {gkd} --train-iters 1")
    (step,), first = job.steps, whole.steps[0]
    assert step["distill/divergence"] == pytest.approx(0, abs=1e-6)
    for name in ("sft/loss", "sft/tokens", "policy/grad_norm"):
        assert step[name] == pytest.approx(first[name], rel=1e-4), name


def test_two_streams_at_once(sums_data, tmp_path):
    """With rewards both are learnt from: the loss of the rows falls, and its factor scales its gradient
    only."""
    flags = "--sft-data {data}/sft_worked.jsonl --num-epochs 2 --pipeline-model-parallel-size 2"
    job = run(sums_data, tmp_path / "both", flags)
    assert job.steps[-1]["sft/loss"] < job.steps[0]["sft/loss"]
    assert all(row["advantage/max_abs"] > 0 and row["mismatch/max_abs"] <= 1e-4 for row in job.steps)
