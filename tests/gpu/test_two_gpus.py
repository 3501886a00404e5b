"""Whole jobs of two ranks on two GPUs: NCCL between the ranks, weights to an engine on another GPU, export.

pytest tests/gpu -m two_gpus
MEGARL_GPU_REHEARSAL=cpu pytest tests/gpu/test_two_gpus.py     without GPUs: two ranks on the CPU"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
REHEARSAL = os.environ.get("MEGARL_GPU_REHEARSAL") == "cpu"
pytestmark = [
    pytest.mark.two_gpus,
    pytest.mark.skipif(not REHEARSAL and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LAYOUTS = {
    "an engine on the other GPU": "--actor-ranks 0 --rollout-ranks 1",
    "tensor parallelism of two": "--tensor-model-parallel-size 2",
}


@pytest.fixture(scope="module")
def sums(tmp_path_factory) -> Path:
    """The quickstart's data and its untrained model."""
    folder = tmp_path_factory.mktemp("sums")
    subprocess.run([sys.executable, "-P", ROOT / "tools" / "make_sums.py", "--out", folder], check=True)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_job_trains_and_exports(layout, sums, tmp_path):
    """Two steps with the gate on: trainer and engine agree after weights have gone from GPU to GPU. The export
    at the end gathers from both ranks."""
    command = [sys.executable, "-P", "-m", "megarl.cli", "train", f"@{ROOT}/configs/quickstart_grpo.args"]
    command += [
        "--model",
        sums / "model",
        "--train-data",
        sums / "train.jsonl",
        "--eval-data",
        sums / "test.jsonl",
    ]
    command += ["--save", tmp_path / "run", "--nproc-per-node", "2", "--train-iters", "2", *layout.split()]
    command += ["--rollout-backend", "transformers"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "mismatch/max_abs" in row] == [1, 2]
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()
