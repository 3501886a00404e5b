"""Whole jobs in which roles split their sequences over context-parallel ranks. `pytest
tests/e2e/test_context_parallel.py -m nightly`"""

from __future__ import annotations

import pytest

from tests.e2e.jobs import Job, check_first_step, train
from tests.rewards.models import write_classifier

PPO = ("--algorithm", "ppo", "--kl-mode", "reward", "--kl-coef", "0.01", "--critic-lr", "1e-2")
OFFLOAD = ("--offload", "parameters", "gradients", "optimizer", "--no-reshard-alias")

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def grpo(sums_data, tmp_path_factory) -> Job:
    """Two data-parallel ranks."""
    return train(sums_data, tmp_path_factory.mktemp("grpo") / "run")


@pytest.fixture(scope="module")
def ppo(sums_data, tmp_path_factory) -> Job:
    """The same."""
    return train(sums_data, tmp_path_factory.mktemp("ppo") / "run", *PPO)


@pytest.mark.parametrize("flags", [(), (*OFFLOAD, "--rollout-tensor-parallel-size", "2")])
def test_grpo(sums_data, tmp_path, grpo, flags):
    check_first_step(
        train(sums_data, tmp_path / "cp2", "--context-parallel-size", "2", *flags), grpo, rel=1e-3
    )


def test_a_critic_with_context_parallelism_beside_an_actor_with_tensor_parallelism(sums_data, tmp_path, ppo):
    layout = ("--actor-tensor-model-parallel-size", "2", "--critic-context-parallel-size", "2")
    check_first_step(train(sums_data, tmp_path / "split", *PPO, *layout), ppo, rel=1e-3)


def test_every_size_above_one(sums_data, tmp_path, ppo):
    """Actor TP2 x CP2 on four ranks, critic CP2 x PP2 on the same, reference CP4."""
    layout = (
        "--nproc-per-node",
        "4",
        "--actor-tensor-model-parallel-size",
        "2",
        "--actor-context-parallel-size",
        "2",
        "--actor-sequence-parallel",
        "--critic-context-parallel-size",
        "2",
        "--critic-pipeline-model-parallel-size",
        "2",
        "--reference-tensor-model-parallel-size",
        "1",
        "--reference-context-parallel-size",
        "4",
        "--no-reference-sequence-parallel",
    )
    check_first_step(train(sums_data, tmp_path / "split", *PPO, *layout), ppo, rel=1e-3)


def test_a_reward_model_scores_the_same(sums_data, tmp_path):
    write_classifier(tmp_path / "classifier", "qwen2", sums_data / "model")
    flags = ("--reward-model", str(tmp_path / "classifier"), "--reward-model-backend", "megatron")
    split, whole = (
        train(sums_data, tmp_path / name, *flags, *size)
        for name, size in (("cp2", ("--reward-context-parallel-size", "2")), ("dp2", ()))
    )
    check_first_step(split, whole, rel=1e-3)
    assert split.steps[0]["reward/reward_model_mean"] == pytest.approx(
        whole.steps[0]["reward/reward_model_mean"], abs=1e-5
    )
    assert split.steps[0]["reward/failed"] == whole.steps[0]["reward/failed"] == 0


def test_supervised_fine_tuning(sums_data, tmp_path):
    flags = (
        "--algorithm",
        "sft",
        "--train-data",
        str(sums_data / "sft_worked.jsonl"),
        "--max-response-length",
        "48",
    )
    split, whole = (
        train(sums_data, tmp_path / name, *flags, *size)
        for name, size in (("cp2", ("--context-parallel-size", "2")), ("dp2", ()))
    )
    assert split.returncode == whole.returncode == 0, split.output + whole.output
    for ours, theirs in zip(split.metrics, whole.metrics, strict=True):
        assert ours["policy/loss"] == pytest.approx(theirs["policy/loss"], rel=1e-4)
