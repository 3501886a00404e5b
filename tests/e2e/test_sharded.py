"""Whole jobs with Megatron-FSDP beside the same ones with the distributed optimizer. `pytest tests/e2e/test_sharded.py -m slow`"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.jobs import Job, train

PPO = ("--algorithm", "ppo", "--kl-mode", "reward", "--kl-coef", "0.01", "--critic-lr", "1e-2")
SAME = ("response/length_mean", "batch/tokens")
CLOSE = ("reward/mean", "policy/loss", "policy/grad_norm", "critic/grad_norm", "critic/loss", "policy/entropy")

pytestmark = pytest.mark.slow


def check(job: Job, other: Job) -> None:
    """The gate holds in every step, and the first one is the same but for rounding: gradients are summed in another order."""
    for one in (job, other):
        assert one.returncode == 0, one.output
        assert all(row["mismatch/max_abs"] <= 1e-4 for row in one.steps) and len(one.steps) == 3
    ours, theirs = job.steps[0], other.steps[0]
    assert {key: ours[key] for key in SAME} == {key: theirs[key] for key in SAME}
    shared = ours.keys() & {*CLOSE}
    assert shared and {key: ours[key] for key in shared} == pytest.approx({key: theirs[key] for key in shared}, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("flags", [(), ("--data-parallel-sharding-strategy", "optim"), ("--rollout-tensor-parallel-size", "2"), ("--no-reshard-alias",)])
def test_grpo(sums_data, tmp_path, flags):
    job = train(sums_data, tmp_path / "sharded", "--use-megatron-fsdp", *flags)
    check(job, train(sums_data, tmp_path / "plain", *(flag for flag in flags if "sharding" not in flag and flag != "optim")))
    weights = load_file(job.folder / "hf" / "model.safetensors")
    start = load_file(sums_data / "model" / "model.safetensors")
    assert weights.keys() == start.keys()
    assert all(weight.isfinite().all() and not torch.equal(weight, start[name]) for name, weight in weights.items())


def test_ppo(sums_data, tmp_path):
    """The actor over context-parallel ranks, the critic over data-parallel ones."""
    layout = ("--actor-context-parallel-size", "2")
    check(train(sums_data, tmp_path / "sharded", *PPO, *layout, "--use-megatron-fsdp"), train(sums_data, tmp_path / "plain", *PPO, *layout))
