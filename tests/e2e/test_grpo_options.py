"""Whole jobs with what GRPO can be asked for: a reference policy, KL in the loss and in the reward, entropy,
truncated importance sampling, sequence parallelism, micro-batches that leave some ranks without samples,
bf16.

    pytest tests/e2e/test_grpo_options.py"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.jobs import Job, train

pytestmark = (
    pytest.mark.nightly
)  # PPO's jobs have the same options in the default suite; numbers: tests/algorithms, tests/kernels
LR = 1e-3
IN_REWARD = (
    "--kl-mode",
    "reward",
    "--kl-coef",
    "0.05",
    "--kl-estimator",
    "k2",
    "--entropy-coef",
    "0.01",
    "--tis-clip",
    "2",
    "--loss-aggregation",
    "seq-mean-token-mean",
    "--no-normalize-advantages-by-std",
    "--clip-eps-high",
    "0.28",
    "--clip-ratio-c",
    "3",
    "--num-epochs",
    "2",
)


@pytest.fixture(scope="module")
def kl_in_loss(sums_data, tmp_path_factory) -> Job:
    """One update per step, so that the first update's metrics are the first step's."""
    flags = (
        "--kl-mode",
        "loss",
        "--kl-coef",
        "0.05",
        "--global-batch-size",
        "16",
        "--tensor-model-parallel-size",
        "2",
        "--sequence-parallel",
    )
    return train(sums_data, tmp_path_factory.mktemp("loss") / "run", *flags)


@pytest.fixture(scope="module")
def kl_in_reward(sums_data, tmp_path_factory) -> dict[str, Job]:
    """The same on two data-parallel ranks, with at most two or three samples in a micro-batch, and on two
    pipeline stages."""
    folder = tmp_path_factory.mktemp("reward")
    layouts = {"dp2": ("--max-tokens-per-micro-batch", "80"), "pp2": ("--pipeline-model-parallel-size", "2")}
    return {name: train(sums_data, folder / name, *IN_REWARD, *flags) for name, flags in layouts.items()}


def test_kl_in_the_loss_is_zero_until_the_policy_moves(kl_in_loss):
    assert kl_in_loss.returncode == 0, kl_in_loss.output
    kl = [row["policy/ref_kl"] for row in kl_in_loss.steps]
    assert kl[0] == 0.0 and 0 < kl[1] and 0 < kl[2]
    for row in kl_in_loss.steps:
        assert row["policy/ratio_deviation_max"] == 0.0  # one update per step: on policy
        assert row["time/ref_log_probs_s"] > 0 and row["mismatch/max_abs"] <= 1e-4


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_kl_in_the_reward_with_everything_else(kl_in_reward, layout_job, layout):
    job = kl_in_reward[layout]
    assert job.returncode == 0, job.output
    for row in job.steps:
        assert (
            row["mismatch/max_abs"] <= 1e-4 and row["policy/ref_kl"] > 0
        )  # four updates per step, from the second on the policy moved
        assert row["policy/tis_weight"] == pytest.approx(
            1, abs=1e-4
        )  # the mean of exp(trainer - engine): on policy they agree
        assert 5.0 < row["policy/entropy"] < 5.65  # at most log(283) = 5.645
        assert row["policy/ratio_deviation_max"] > 0 and row["policy/dual_clip_fraction"] == 0
    first, plain = job.steps[0], layout_job("one").steps[0]
    assert first["reward/mean"] == plain["reward/mean"]  # the reward that is shown is the user's, without KL


def test_options_do_not_depend_on_layout_and_micro_batches(kl_in_reward):
    """Every share is of global counts, the KL of a sample reaches all ranks, and a rank without samples takes
    part."""
    for ours, other in zip(kl_in_reward["dp2"].steps, kl_in_reward["pp2"].steps, strict=True):
        for name in ("reward/mean", "response/length_mean", "batch/tokens"):
            assert ours[name] == other[name], name
        # fp32 sums in another order; Adam carries it on (test_grpo_job.py).
        for name in (
            "policy/grad_norm",
            "policy/loss",
            "policy/ref_kl",
            "policy/entropy",
            "advantage/max_abs",
        ):
            assert ours[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name


def test_bf16_trains_from_the_loaded_weights(sums_data, tmp_path):
    """Two steps of two updates move a weight by about four learning rates and by bf16's rounding, not away to
    what the optimizer's fp32 copy held before the weights were loaded. Single tokens differ by more than
    fp32's gate accepts of many."""
    job = train(
        sums_data,
        tmp_path / "run",
        "--bf16",
        "--tensor-model-parallel-size",
        "2",
        "--rollout-tensor-parallel-size",
        "2",
        "--train-iters",
        "2",
        "--lr",
        str(LR),
    )
    assert job.returncode == 0, job.output
    assert (
        all(row["mismatch/mean_abs"] <= 1e-2 for row in job.steps)
        and max(row["mismatch/max_abs"] for row in job.steps) > 1e-4
    )
    assert json.loads((job.folder / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    start, weights = (
        load_file(folder / "model.safetensors") for folder in (sums_data / "model", job.folder / "hf")
    )
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16
        moved, rounding = (weight.float() - start[name]).abs(), start[name].abs() * 2**-8
        assert (moved <= 6 * LR + 2 * rounding).all(), (
            name
        )  # Adam's first steps are of the learning rate, at most 1.5 times that
    assert (weights["lm_head.weight"].float() - start["lm_head.weight"]).abs().max() > LR


@pytest.mark.parametrize("loss", ["clip-cov", "kl-cov"])
def test_tokens_are_selected_by_covariance_in_any_layout(sums_data, tmp_path, loss):
    """Two steps of two updates each. Log-probs of two layouts differ by rounding, so nearly equal covariances may
    change places: of a hundred selected tokens hardly one."""
    flags = ("--policy-loss", loss, "--cov-share", "0.2", "--train-iters", "2")
    flags += ("--cov-low", "0.01", "--cov-high", "2") if loss == "clip-cov" else ()
    dp2, other = (
        train(sums_data, tmp_path / name, *flags, *layout)
        for name, layout in (
            ("dp2", ()),
            ("tp2", ("--tensor-model-parallel-size", "2", "--max-tokens-per-micro-batch", "48")),
        )
    )
    for ours, theirs in zip(dp2.steps, other.steps, strict=True):
        assert ours["covariance/selected"] == theirs["covariance/selected"] > 10
        assert ours["covariance/mean"] == pytest.approx(theirs["covariance/mean"], rel=1e-3, abs=1e-6)
        assert ours["policy/loss"] == pytest.approx(theirs["policy/loss"], rel=2e-2, abs=1e-4)
