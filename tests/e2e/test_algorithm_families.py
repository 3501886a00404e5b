"""Whole jobs of two steps with every algorithm, every policy loss and every correction, on two data-parallel
ranks, with several updates per step; one with context parallelism.

    pytest tests/e2e/test_algorithm_families.py -m nightly"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megarl.algorithms import REGISTRY
from megarl.algorithms.listing import CORRECTIONS
from megarl.algorithms.ratio_transforms import TRANSFORMS
from tests.e2e.jobs import Job, train

pytestmark = pytest.mark.nightly
TWO_SCORES = f"--reward-function {Path(__file__).parent}/scores_reward.py:reward"
JOBS = {
    # algorithm, policy loss, correction and what else there is: each value occurs in a job.
    "rloo": "--algorithm rloo --policy-loss reinforce --global-batch-size 16 --kl-mode reward --kl-coef 0.05 "
    "--kl-estimator k1 --overlong-buffer 8",
    "reinforce++": "--algorithm reinforce++ --policy-loss sapo --token-veto 1e-4 --kl-mode reward --kl-coef 0.05",
    "reinforce++-baseline": "--algorithm reinforce++-baseline --policy-loss dppo-tv --mis-level token --mis-low 0.5 "
    "--mis-high 5 --tis-clip 5 --kl-mode loss --kl-coef 0.05 --kl-estimator k2",
    "opo": "--algorithm opo --policy-loss gmpo --mis-level geometric --entropy-coef 0.01",
    "maxrl": "--algorithm maxrl --policy-loss dppo-kl --mis-level sequence --tensor-model-parallel-size 2",
    "grpo": "--algorithm grpo --policy-loss gspo --tis-clip 2 --tis-level sequence --context-parallel-size 2 "
    "--loss-aggregation seq-mean-token-mean",
    "ppo": "--algorithm ppo --policy-loss gspo-token --tis-clip 2 --overlong-filter --critic-gae-lambda 1 "
    "--gae-lambda-alpha 0.5 "
    "--max-response-length 128",
    "gdpo": f"--algorithm gdpo --policy-loss clip-cov {TWO_SCORES} --score-weights correct=1 short=0.5 "
    "--eval-data {data}/test.jsonl --eval-interval 2",
    "ppo-lagrangian": "--algorithm ppo-lagrangian --cost-limit 0.5 --score-weights letters=1 cost=0 --reward-function "
    f"{Path(__file__).parent}/cost_reward.py:letters --kl-mode reward --kl-coef 0.05",
    "raft": "--algorithm raft --raft-keep 2 --overlong-buffer 8 --overlong-penalty 5",
    "online-dpo": "--algorithm online-dpo --global-batch-size 16 --label-smoothing 0.1",
    "remax": "--algorithm remax --policy-loss reinforce --global-batch-size 16 --loss-aggregation seq-mean-token-sum "
    "--positive-nll-coef 0.1",
    "kl-cov": f"--algorithm grpo --policy-loss kl-cov {TWO_SCORES}",
    "stale": "--algorithm grpo --policy-loss cispo --staleness 1 --mis-level geometric --mis-low 0.5 --mis-high 2",
}


@pytest.fixture(scope="module")
def jobs(sums_data, tmp_path_factory) -> dict[str, Job]:
    folder = tmp_path_factory.mktemp("families")
    flags = "--train-iters 2 --num-epochs 1"
    return {
        name: train(sums_data, folder / name, *f"{flags} {own}".replace("{data}", str(sums_data)).split())
        for name, own in JOBS.items()
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", JOBS)
def test_it_trains(jobs, name):
    job = jobs[name]
    assert job.returncode == 0, job.output
    assert len(job.steps) == 2
    for row in job.steps:
        assert row["policy/grad_norm"] > 0 and math.isfinite(row["policy/loss"])
        assert row["mismatch/max_abs"] <= 1e-4
        if "correction/weight" in row and name != "stale":  # trainer and engine agree
            assert row["correction/weight"] == pytest.approx(1, abs=1e-3)
            assert row["correction/effective_sample_size"] == pytest.approx(1, abs=1e-3)


def test_long_responses_are_penalised_and_left_out(jobs):
    rows = [*jobs["rloo"].steps, *jobs["ppo"].steps]
    assert all(0 < row["reward/overlong_penalty"] <= 1 for row in rows[:2])
    assert all(row["reward/overlong_filtered"] > 0 for row in rows[2:])
    for row in jobs["raft"].steps:
        check_rewards_of_raft(row)


def check_rewards_of_raft(row):
    """The responses that are kept lose much, and are reported with the rewards that they were given."""
    assert row["reward/overlong_penalty"] > 1 and row["raft/reward"] >= row["reward/min"] >= 0


def check_right_answers(row):
    """Every reward above 0 is right, and the one update of a step has such answers."""
    assert row["policy/positive_share"] == pytest.approx(1) and row["policy/positive_nll"] > 0
    assert row["remax/without_baseline"] == 0


def test_right_answers_are_counted(jobs):
    for row in jobs["remax"].steps:
        check_right_answers(row)


def test_two_scores_are_weighed_and_reported(jobs):
    """The weighted sum of means is the mean of weighted sums, to float64 rounding."""
    for name, weight in (("gdpo", 0.5), ("kl-cov", 1.0)):
        for row in jobs[name].steps:
            wanted = row["score/correct"] + weight * row["score/short"]
            assert row["reward/mean"] == pytest.approx(wanted, abs=1e-9) and row["score/short"] > 0
    held_out = next(row for row in jobs["gdpo"].metrics if "eval/reward" in row)
    for mode in ("", "_greedy"):
        wanted = held_out[f"eval/score{mode}/correct"] + 0.5 * held_out[f"eval/score{mode}/short"]
        assert held_out[f"eval/reward{mode}"] == pytest.approx(wanted, abs=1e-9)


def test_every_family_has_a_job():
    flags = " ".join(JOBS.values())
    others = {
        name for name, one in REGISTRY.items() if not one.needs_rollout or one.is_taught
    }  # test_preference_jobs.py
    assert all(f"--algorithm {name} " in flags for name in REGISTRY if name not in others)
    assert all(f"--policy-loss {name} " in flags for name in TRANSFORMS if name != "ppo")
    assert all(correction.flags.split(" --")[0] in flags for correction in CORRECTIONS)
