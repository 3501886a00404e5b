"""A whole GRPO job on a mixture of experts, from random weights: experts dealt out over the ranks that train,
one engine with TP=2.

pytest tests/e2e/test_experts.py        20 s"""

from __future__ import annotations

import json
import math
import shutil

import pytest
from safetensors.torch import load_file

from tests.e2e.jobs import Job, train

EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

LOSSES = (
    "--moe-router-load-balancing-type",
    "seq_aux_loss",
    "--moe-aux-loss-coeff",
    "1e-3",
    "--moe-z-loss-coeff",
    "1e-4",
    "--moe-routing-replay",
    "policy",
)


@pytest.fixture(scope="module")
def job(sums_data, tmp_path_factory) -> Job:
    folder = tmp_path_factory.mktemp("experts")
    shutil.copytree(sums_data / "model", folder / "model", ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | EXPERTS))
    return train(
        sums_data,
        folder / "run",
        "--model",
        str(folder / "model"),
        "--random-init",
        "--expert-model-parallel-size",
        "2",
        "--rollout-tensor-parallel-size",
        "2",
        "--train-iters",
        "2",
        *LOSSES,
    )


def test_trainer_and_engine_agree_and_the_policy_moves(job):
    assert job.returncode == 0, job.output
    assert len(job.steps) == 2
    for row in job.steps:
        assert (
            row["mismatch/max_abs"] <= 1e-4 and row["policy/grad_norm"] > 0
        )  # fp32; the second step runs on synced weights


def test_the_record_says_how_experts_are_used(job):
    for row in job.steps:
        assert 1 <= row["moe/load_ratio"] <= EXPERTS["num_experts"] / EXPERTS["num_experts_per_tok"] + 1e-9
        assert (
            1 / EXPERTS["num_experts"] < row["moe/max_share"] <= 1 / EXPERTS["num_experts_per_tok"]
            and row["moe/dead_experts"] >= 0
        )
        assert (
            0 < row["moe/entropy"] <= math.log(EXPERTS["num_experts"])
            and 0.9 < row["moe/balance_loss"] < 4
            and row["moe/z_loss"] > 0
        )
        assert (
            0 < row["moe/replay_changed"] < 0.5
        )  # of two updates per step the second one's router has moved


def test_the_export_has_every_expert_and_loads(job):
    from transformers import AutoModelForCausalLM

    folder = job.folder / "hf"
    names = load_file(folder / "model.safetensors").keys()
    assert sum(name.startswith("model.layers.0.mlp.experts.") for name in names) == 3 * EXPERTS["num_experts"]
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
