"""Whole GRPO jobs on the emulated device, with the engine of --rollout-backend transformers, against the CPU.

Driver, ranks, engine, gate, rewards, advantages, update, weight sync and export, as on a machine with GPUs.

    make test-hostcuda ARGS=tests/hostcuda/test_job.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import succeed

ON_CPU = {"HOSTCUDA": None, "PYTHONPATH": None, "LD_PRELOAD": None}
ROOT = Path(__file__).resolve().parents[2]
REWARD = "def share_of_ones(data_source, solution_str, ground_truth, extra_info):\n"
REWARD += "    return solution_str.count('1') / max(1, len(solution_str))\n"
LAYOUTS = {
    "one rank": "--nproc-per-node 1",
    "data parallelism": "--nproc-per-node 2",
    "tensor parallelism": "--nproc-per-node 2 --tensor-model-parallel-size 2",
    "an engine out of process": "--nproc-per-node 1 --rollout-engine out-of-process",
    "an engine on another device": "--nproc-per-node 2 --actor-ranks 0 --rollout-ranks 1",
}
STEPS = 2


@pytest.fixture(scope="module")
def job(sums_paths, tmp_path_factory):
    """job(flags, environment) -> the metrics of the steps of a job."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "reward.py").write_text(REWARD)
    common = f"""@{ROOT}/configs/quickstart_grpo.args --model {sums_paths["model"]} --eval-interval 0
        --train-data {sums_paths["train"]} --eval-data {sums_paths["test"]}
        --reward-function {folder}/reward.py:share_of_ones --rollout-backend transformers
        --train-iters {STEPS} --num-prompts 4 --num-samples-per-prompt 4 --global-batch-size 8
        --max-response-length 12""".split()

    def run(flags: str, environment: dict[str, str | None]) -> list[dict]:
        save = folder / f"run-{len([*folder.iterdir()])}"
        arguments = ["-P", "-m", "megarl.cli", "train", *common, *flags.split(), "--save", save]
        succeed(*arguments, timeout=250, environment=environment)
        assert (save / "hf" / "model.safetensors").exists()
        rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if "policy/grad_norm" in row]

    return run


@pytest.fixture(scope="module")
def on_cpu(job) -> list[dict]:
    return job("--nproc-per-node 1", ON_CPU)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_job_has_the_cpus_numbers(layout, job, on_cpu):
    """The first step's tokens are the same, as a draw that rounding decides is rare; then losses and gradient
    norms differ by fp32's rounding in another order, and the gate holds every step."""
    on_cuda = job(layout, {})
    assert len(on_cuda) == len(on_cpu) == STEPS
    assert all(row["memory/peak_bytes"] > 0 for row in on_cuda), "the device's allocator was used"
    first, expected = on_cuda[0], on_cpu[0]
    for name in ("mismatch/tokens", "reward/mean"):
        assert first[name] == pytest.approx(expected[name], rel=1e-6), name
    for name in ("policy/loss", "policy/grad_norm"):
        assert first[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert all(row["mismatch/max_abs"] < 1e-4 for row in on_cuda)
