"""Whole jobs that train adapters: the engine has them merged at every step, and what is exported is what it
had.

pytest tests/e2e/test_lora_job.py"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.jobs import Job, train

LORA = ("--lora-rank", "4", "--lora-alpha", "8")
KL = ("--kl-mode", "loss", "--kl-coef", "0.05", "--global-batch-size", "16")
PPO = ("--algorithm", "ppo", "--kl-mode", "reward", "--kl-coef", "0.01", "--critic-lr", "1e-2")


def check(job: Job, sums_data, critic: bool = False) -> None:
    """The gate holds although the weights move, and only the adapted matrices have moved, by what the
    adapters say."""
    assert job.returncode == 0, job.output
    assert all(row["mismatch/max_abs"] <= 1e-4 for row in job.steps)
    for folder, adapter in [("hf", "hf_adapter")] + ([("hf_critic", "hf_critic_adapter")] if critic else []):
        config = json.loads((job.folder / adapter / "adapter_config.json").read_text())
        tensors = load_file(job.folder / adapter / "adapter_model.safetensors")
        base, merged = (
            load_file(sums_data / "model" / "model.safetensors"),
            load_file(job.folder / folder / "model.safetensors"),
        )
        moved = {name for name in merged if name in base and not torch.equal(merged[name], base[name])}
        downs = {
            name.removeprefix("base_model.model.").replace("lora_A.", ""): t
            for name, t in tensors.items()
            if ".lora_A." in name
        }
        assert moved == downs.keys() and {name.split(".")[-2] for name in moved} == {
            *config["target_modules"]
        }
        for name, down in downs.items():
            up = tensors["base_model.model." + name.replace(".weight", ".lora_B.weight")]
            change = config["lora_alpha"] / config["r"] * up @ down
            torch.testing.assert_close(merged[name], base[name] + change, rtol=0, atol=1e-6)
            assert change.abs().max() > 1e-4  # an engine without the adapters would be seen by the gate


def test_adapters_alone_train_and_the_reference_needs_no_weights(sums_data, tmp_path):
    job = train(sums_data, tmp_path / "run", *LORA, *KL, "--nproc-per-node", "1")
    check(job, sums_data)
    kl = [row["policy/ref_kl"] for row in job.steps]
    assert (
        kl[0] == 0.0 and 0 < kl[1] and 0 < kl[2]
    )  # the reference is the actor without its adapters: at first the very same numbers


@pytest.mark.nightly
def test_a_reference_of_its_own_gives_the_same(sums_data, tmp_path):
    """On two ranks each a whole model, the actor's being split."""
    split = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    own = ("--reference-tensor-model-parallel-size", "1", "--no-reference-sequence-parallel")
    jobs = [
        train(sums_data, tmp_path / name, *LORA, *KL, *split, *flags)
        for name, flags in (("shared", ()), ("own", own))
    ]
    for job in jobs:
        check(job, sums_data)
    for shared, separate in zip(*(job.steps for job in jobs), strict=True):
        assert shared["reward/mean"] == separate["reward/mean"]
        assert shared["policy/ref_kl"] == pytest.approx(separate["policy/ref_kl"], rel=1e-3, abs=1e-8)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flags",
    [
        ("--no-reshard-alias", "--offload", "parameters", "gradients", "optimizer"),
        (
            "--qkv-layout",
            "stacked",
            "--tensor-model-parallel-size",
            "2",
            "--rollout-tensor-parallel-size",
            "2",
        ),
        ("--pipeline-model-parallel-size", "2", "--critic-lora-rank", "2"),
        (
            "--actor-ranks",
            "0",
            "--rollout-ranks",
            "1",
            "--critic-ranks",
            "0",
            "--check-weight-sync",
        ),  # an engine that pulls
    ],
    ids=("offload", "stacked", "pp2", "out_of_process"),
)
def test_ppo_with_adapters_in_actor_and_critic(sums_data, tmp_path, flags):
    job = train(sums_data, tmp_path / "run", *PPO, *LORA, *flags)
    check(job, sums_data, critic=True)
    assert all(row["critic/grad_norm"] > 0 for row in job.steps)
    if flags[0] == "--qkv-layout":
        assert all(row["sync/bytes"] == 0 for row in job.steps)  # what is merged is the engine's memory
