"""Whole jobs with Megatron-FSDP beside the same ones with the distributed optimizer. `pytest
tests/e2e/test_sharded.py -m nightly`"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.jobs import check_first_step, train

PPO = ("--algorithm", "ppo", "--kl-mode", "reward", "--kl-coef", "0.01", "--critic-lr", "1e-2")

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--data-parallel-sharding-strategy", "optim"),
        ("--rollout-tensor-parallel-size", "2"),
        ("--no-reshard-alias",),
    ],
)
def test_grpo(sums_data, tmp_path, flags):
    job = train(sums_data, tmp_path / "sharded", "--use-megatron-fsdp", *flags)
    plain = train(
        sums_data, tmp_path / "plain", *(flag for flag in flags if "sharding" not in flag and flag != "optim")
    )
    check_first_step(job, plain, rel=1e-4)
    weights = load_file(job.folder / "hf" / "model.safetensors")
    start = load_file(sums_data / "model" / "model.safetensors")
    assert weights.keys() == start.keys()
    assert all(
        weight.isfinite().all() and not torch.equal(weight, start[name]) for name, weight in weights.items()
    )


def test_ppo(sums_data, tmp_path):
    """The actor over context-parallel ranks, the critic over data-parallel ones."""
    layout = ("--actor-context-parallel-size", "2")
    plain = train(sums_data, tmp_path / "plain", *PPO, *layout)
    check_first_step(
        train(sums_data, tmp_path / "sharded", *PPO, *layout, "--use-megatron-fsdp"), plain, rel=1e-4
    )
