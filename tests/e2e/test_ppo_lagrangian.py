"""Whole jobs of PPO-Lagrangian: two critics, and a multiplier that follows the cost and resumes.

pytest tests/e2e/test_ppo_lagrangian.py -m nightly"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.e2e.test_resume import check_equal, halves

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
REWARD = f"{Path(__file__).with_name('cost_reward.py')}:letters"
FLAGS = (
    *("--algorithm", "ppo-lagrangian", "--reward-function", REWARD, "--score-weights", "letters=1", "cost=0"),
    *(
        "--cost-limit",
        "0.05",
        "--lagrange-lr",
        "0.5",
        "--lagrange-init",
        "0.5",
        "--num-rollouts-to-log",
        "-1",
    ),
)


@pytest.mark.parametrize(
    "layout", [(), ("--critic-ranks", "1", "--actor-ranks", "0", "--rollout-ranks", "0")]
)
def test_the_multiplier_follows_the_cost_and_resumes(sums_data, tmp_path, layout):
    whole, half = halves(sums_data, tmp_path, *FLAGS, *layout)
    multiplier = 0.5
    for row in whole.steps:
        lines = (whole.folder / "rollouts" / f"step_{row['step']:06d}.jsonl").read_text().splitlines()
        rewards = [json.loads(line)["reward"] for line in lines]
        assert row["reward/mean"] == pytest.approx(sum(rewards) / 16)  # without the cost
        assert row["cost/mean"] == pytest.approx(row["score/cost"], rel=1e-6)
        assert row["cost/multiplier"] == pytest.approx(multiplier, rel=1e-6)
        multiplier *= math.exp(0.5 * multiplier * (row["cost/mean"] - 0.05))
        for name in ("critic/loss", "cost_critic/loss", "cost_critic/grad_norm", "policy/grad_norm"):
            assert row[name] > 0
        assert row["mismatch/max_abs"] <= 1e-4
    assert multiplier != 0.5
    check_equal(whole, half)
    for name in ("hf_critic", "hf_cost_critic"):
        assert (whole.folder / name / "model.safetensors").is_file()
