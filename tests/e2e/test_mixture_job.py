"""A whole job on two files with weights: each step has the mixture, and a resumed run goes on with the same rows.

pytest tests/e2e/test_mixture_job.py -m nightly"""

from __future__ import annotations

import json
import shutil

import pytest

from tests.e2e.jobs import train

pytestmark = pytest.mark.nightly


def rows_of(folder, step) -> list[int]:
    lines = (folder / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line)["row"] for line in lines]


def test_each_step_has_the_mixture_and_a_resume_goes_on(sums_data, tmp_path):
    rows = (sums_data / "train.jsonl").read_text().splitlines(keepends=True)
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("".join(rows[:5]))  # the second pass begins in step 2
    (data / "more.jsonl").write_text("".join(rows[5:8]))
    (data / "model").symlink_to(sums_data / "model")
    flags = (
        *(
            "--train-data",
            str(data / "train.jsonl"),
            str(data / "more.jsonl"),
            "--train-data-weights",
            "3",
            "1",
        ),
        *("--train-iters", "4", "--save-interval", "2", "--num-rollouts-to-log", "-1"),
    )
    folder = tmp_path / "whole"
    whole = train(data, folder, *flags)
    assert whole.returncode == 0, whole.output
    steps = [rows_of(folder, step) for step in range(1, 5)]
    assert all(
        sum(row >= 5 for row in step) == 4 and len(step) == 16 for step in steps
    )  # 4 samples of a prompt
    shutil.copytree(folder, tmp_path / "part")
    for later in (tmp_path / "part" / "checkpoints").glob("step_000004*"):
        shutil.rmtree(later)
    resumed = train(data, tmp_path / "part", *flags, "--load", str(tmp_path / "part"))
    assert resumed.returncode == 0 and "continues after step 2" in resumed.output, resumed.output
    assert [rows_of(tmp_path / "part", step) for step in range(1, 5)] == steps
