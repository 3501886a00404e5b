"""Whole jobs with --old-log-probs engine: the same training as with the pass that it saves, but for rounding,
and the gate before the first weight changes.

    pytest tests/e2e/test_engine_log_probs.py                 the gate
    pytest tests/e2e/test_engine_log_probs.py -m nightly      every layout, with a KL in the reward, and PPO"""

from __future__ import annotations

import math

import pytest

from tests.e2e.jobs import train

ENGINE = ("--old-log-probs", "engine")
ONE_UPDATE = ("--global-batch-size", "16")
KL = ("--kl-mode", "reward", "--kl-coef", "0.05", "--kl-estimator", "k1")
GATE = ("mean_abs", "clipped_abs", "log_prob_abs", "max_abs", "outliers", "kl", "tokens")
LAYOUTS = {
    "one": ("--nproc-per-node", "1", "--policy-loss", "gspo"),
    "tp2": ("--tensor-model-parallel-size", "2", *KL),
    "cp2": ("--context-parallel-size", "2", *KL),
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "rank_1_to_rank_0": ("--actor-ranks", "1", "--rollout-ranks", "0"),
    "ppo": ("--algorithm", "ppo", "--critic-lr", "1e-3"),
}


def check_same(engine, trainer):
    assert engine.returncode == trainer.returncode == 0, engine.output + trainer.output
    assert len(engine.steps) == len(trainer.steps) == 3
    for ours, other in zip(engine.steps, trainer.steps):
        assert "time/log_probs_s" not in ours and "time/log_probs_s" in other
        for name in ("reward/mean", "response/length_mean", "batch/tokens"):
            assert ours[name] == other[name], name
        for name in ("policy/loss", "policy/grad_norm", "policy/entropy", "policy/clip_fraction"):
            # log-probs differ by 1e-6, Adam carries it on (test_grpo_job.py)
            assert ours[name] == pytest.approx(other[name], rel=1e-3, abs=2e-6), name
    for name in GATE:
        # of the same tokens and weights: k3 of differences of 1e-6 is itself all rounding
        wanted = pytest.approx(trainer.steps[0][f"mismatch/{name}"], rel=1e-4, abs=1e-9)
        assert engine.steps[0][f"mismatch/{name}"] == wanted, name


@pytest.mark.nightly
def test_training_is_that_with_the_pass_and_the_gate_sees_the_same(sums_data, tmp_path):
    trainer = train(sums_data, tmp_path / "trainer", *ONE_UPDATE)
    engine = train(sums_data, tmp_path / "engine", *ONE_UPDATE, *ENGINE)
    check_same(engine, trainer)
    assert engine.steps[0]["mismatch/tokens"] > 100 and engine.steps[0]["mismatch/max_abs"] > 0


def test_a_disagreement_ends_the_job_before_the_first_update(sums_data, tmp_path):
    job = train(sums_data, tmp_path / "run", *ENGINE, "--gate-max-abs", "1e-12", timeout=200)
    assert job.returncode == 1 and not (job.folder / "metrics.jsonl").exists(), job.output
    assert "trainer and engine disagree on " in job.output and " by the engine, " in job.output
    assert "mismatch/max_abs" in job.output and "TOO LARGE" in job.output
    value = float(job.output.split("mismatch/max_abs ")[1].split(",")[0])
    assert 0 < value < 1e-4 and math.isfinite(value)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts(sums_data, tmp_path, layout):
    flags = (*ONE_UPDATE, *LAYOUTS[layout])
    trainer = train(sums_data, tmp_path / "trainer", *flags)
    check_same(train(sums_data, tmp_path / "engine", *flags, *ENGINE), trainer)


@pytest.mark.nightly
def test_of_several_updates_the_first_is_judged(sums_data, tmp_path):
    job = train(sums_data, tmp_path / "run", *ENGINE)
    assert job.returncode == 0, job.output
    for row in job.steps:
        tokens = row["response/length_mean"] * 16
        assert 0 < row["mismatch/tokens"] < tokens and row["mismatch/max_abs"] < 1e-3
