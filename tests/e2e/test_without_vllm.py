"""A job with --rollout-backend transformers on a machine without vLLM, in process and out of process.

pytest tests/e2e/test_without_vllm.py -m nightly"""

from __future__ import annotations

import json

import pytest

from tests.e2e.jobs import COMMON, replace_flags
from tests.launch import run

PLACES = {"in-process": (), "out-of-process": ("--actor-ranks", "0", "--rollout-ranks", "1")}


@pytest.mark.nightly
@pytest.mark.parametrize("place", PLACES)
def test_a_job_needs_no_vllm(place, sums_data, tmp_path):
    absent = tmp_path / "absent" / "vllm"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ModuleNotFoundError('there is no vLLM here')")
    flags = ["--train-iters", "2", "--rollout-backend", "transformers", *PLACES[place]]
    flags += ["--model", str(sums_data / "model"), "--train-data", str(sums_data / "train.jsonl")]
    arguments = replace_flags(COMMON, [*flags, "--save", str(tmp_path / "run")])
    done = run(
        *("-P", "-m", "megarl.cli", "train", *arguments),
        timeout=200,
        environment={"PYTHONPATH": str(absent.parent)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2]
