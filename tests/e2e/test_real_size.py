"""The recipe of Qwen2.5-0.5B on GSM8K at its true size: random weights of its shapes, bf16, two steps on two
ranks, within 20 GB.

pytest tests/e2e/test_real_size.py -m nightly"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.e2e.jobs import Job

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]

CHECKOUT = Path(__file__).resolve().parents[2]
MAX_BYTES = 20 * 10**9
SMALL = [
    "--nproc-per-node",
    "2",
    "--train-iters",
    "2",
    "--num-prompts",
    "8",
    "--num-samples-per-prompt",
    "2",
    "--global-batch-size",
    "8",
    "--max-response-length",
    "32",
    "--max-tokens-per-micro-batch",
    "1024",
    "--recompute-granularity",
    "selective",
    "--recompute-modules",
    "mlp",
    "layernorm",
    "--eval-interval",
    "0",
    "--reward-function",
    f"{Path(__file__).with_name('reward.py')}:lower_case",
]
LAYOUTS = {
    "dp2_to_tp1": (),
    "tp2_to_tp2": ("--tensor-model-parallel-size", "2", "--rollout-tensor-parallel-size", "2"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Config, tokenizer and random bf16 weights."""
    folder = tmp_path_factory.mktemp("real_size") / "model"
    subprocess.run(
        [sys.executable, CHECKOUT / "tools" / "make_random_model.py", "--out", folder, "--weights"],
        check=True,
        timeout=300,
        cwd=folder.parent,
        env=dict(os.environ, PYTHONSAFEPATH="1"),
    )
    return folder


@pytest.fixture(scope="module")
def rows(model) -> Path:
    """GSM8K's columns as published."""
    path = model.with_name("rows.jsonl")
    path.write_text(
        "".join(
            json.dumps(
                {
                    "question": f"Natalia sold {n} clips to her friends in April, and half as many "
                    "in May. How many clips did she sell altogether?",
                    "answer": f"In May she sold {n}/2 = <<{n}/2={n // 2}>>{n // 2} clips.\n#### {n + n // 2}",
                }
            )
            + "\n"
            for n in range(10, 74, 2)
        )
    )
    return path


@pytest.fixture(scope="module", params=LAYOUTS)
def job(request, model, rows) -> tuple[Job, int]:
    """The finished job, and the most bytes that all its processes held at once."""
    save = model.with_name(request.param)
    command = [
        sys.executable,
        "-m",
        "megarl.cli",
        "train",
        f"@{CHECKOUT}/configs/qwen2.5_0.5b_gsm8k_grpo.args",
        "--model",
        str(model),
        "--train-data",
        str(rows),
        "--save",
        str(save),
        *SMALL,
        *LAYOUTS[request.param],
    ]
    with open(save.with_suffix(".log"), "w+") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=save.parent,
            env=dict(os.environ, PYTHONSAFEPATH="1"),
        )
        peak = watch(process)
        log.seek(0)
        return Job(process.returncode, log.read(), save), peak


def watch(process: subprocess.Popen, timeout_s: float = 1200, interval_s: float = 0.5) -> int:
    """Wait for the process. Returns the largest sum of resident bytes of it and its descendants (shared pages
    count in each)."""
    deadline = threading.Timer(timeout_s, process.terminate)
    deadline.start()
    peak = 0
    try:
        while process.poll() is None:
            peak = max(peak, sum(resident_bytes(pid) for pid in descendants(process.pid)))
            threading.Event().wait(interval_s)
    finally:
        deadline.cancel()
    return peak


def descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:  # grows on the way
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in _read(task).split()]
    return found


def resident_bytes(pid: int) -> int:
    fields = _read(Path(f"/proc/{pid}/statm")).split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def _read(path: Path) -> str:
    """A process may end between two looks at it."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_two_steps_fit_into_20_gb_and_pass_the_gate(job):
    done, peak = job
    assert done.returncode == 0, done.output
    assert peak <= MAX_BYTES, f"{peak / 1e9:.1f} GB"
    assert [row["step"] for row in done.steps] == [1, 2]
    for row in done.steps:
        assert (
            0 < row["mismatch/mean_abs"] <= 0.02
        )  # seen: 0.009, the gate accepts 0.038; 0 would mean that nothing was compared
        assert row["policy/grad_norm"] > 0 and row["reward/min"] < row["reward/max"]
        assert row["sync/version"] == row["step"]


def test_the_export_loads_in_transformers_and_was_trained(job, model):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    done, _ = job
    exported = AutoModelForCausalLM.from_pretrained(done.folder / "hf", dtype="auto")
    assert exported.dtype == torch.bfloat16 and exported.num_parameters() == 494_032_768
    after, before = (
        load_file(done.folder / "hf" / "model.safetensors"),
        load_file(model / "model.safetensors"),
    )
    assert {name: value.shape for name, value in after.items()} == {
        name: value.shape for name, value in before.items()
    }
    assert any(not torch.equal(after[name], before[name]) for name in before)
