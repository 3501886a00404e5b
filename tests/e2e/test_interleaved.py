"""Whole jobs whose models are interleaved pipelines: two stages of two chunks each, into engines with TP=1.

pytest tests/e2e/test_interleaved.py -m nightly"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.e2e.jobs import train

INTERLEAVED = ("--pipeline-model-parallel-size", "2", "--virtual-pipeline-model-parallel-size", "2")
OFFLOAD = ("--offload", "gradients", "optimizer")


@pytest.fixture(scope="module")
def model(sums_data, tmp_path_factory) -> Path:
    """Four layers, one for each chunk."""
    folder = tmp_path_factory.mktemp("deep") / "model"
    config = AutoConfig.from_pretrained(
        sums_data / "model", num_hidden_layers=4, layer_types=["full_attention"] * 4
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in (sums_data / "model").iterdir():
        if "token" in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def job(sums_data, model, tmp_path_factory):
    return train(
        sums_data,
        tmp_path_factory.mktemp("interleaved") / "run",
        "--model",
        str(model),
        "--kl-mode",
        "loss",
        "--kl-coef",
        "0.01",
        *INTERLEAVED,
        *OFFLOAD,
    )


@pytest.mark.nightly
def test_actor_and_reference_train_with_the_gate_on(job):
    assert job.returncode == 0, job.output
    assert len(job.steps) == 3
    for row in job.steps:  # fp32; from the second step on, on synced weights
        assert row["mismatch/max_abs"] <= 1e-4 and row["policy/grad_norm"] > 0


@pytest.mark.nightly
def test_the_export_holds_every_chunk(job, model):
    start, end = load_file(model / "model.safetensors"), load_file(job.folder / "hf" / "model.safetensors")
    assert start.keys() == end.keys() and not any(start[name].equal(end[name]) for name in start)


@pytest.mark.nightly
def test_one_rank_does_the_same(sums_data, model, job, tmp_path):
    one = train(
        sums_data,
        tmp_path / "run",
        "--model",
        str(model),
        "--kl-mode",
        "loss",
        "--kl-coef",
        "0.01",
        "--nproc-per-node",
        "1",
    )
    for ours, other in zip(job.steps, one.steps, strict=True):
        for key in ("response/length_mean", "reward/mean", "batch/tokens"):
            assert ours[key] == other[key], key
        assert ours["policy/grad_norm"] == pytest.approx(other["policy/grad_norm"], rel=1e-3)


@pytest.mark.nightly
def test_an_interleaved_critic_beside_an_interleaved_actor(sums_data, model, tmp_path):
    job = train(
        sums_data,
        tmp_path / "run",
        "--model",
        str(model),
        "--algorithm",
        "ppo",
        "--kl-mode",
        "reward",
        "--kl-coef",
        "0.01",
        "--critic-lr",
        "1e-2",
        *INTERLEAVED,
        *OFFLOAD,
    )
    assert job.returncode == 0, job.output
    assert (
        all(row["mismatch/max_abs"] <= 1e-4 and row["critic/grad_norm"] > 0 for row in job.steps)
        and len(job.steps) == 3
    )
