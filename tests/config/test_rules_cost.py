"""The score that is a cost must not count in the reward. `pytest tests/config/test_rules_cost.py`"""

import pytest

from megarl.config.roles import place, trained_models
from megarl.config.rules_algorithm import cost_score
from megarl.config.rules_layout import Job
from tests.algorithms.test_listing import load

LAGRANGIAN = "--algorithm ppo-lagrangian --reward-function r.py:f"
REFUSED = {
    LAGRANGIAN: "--score-weights (): must give cost=0",
    f"{LAGRANGIAN} --score-weights cost=1": "--score-weights (cost=1): must give cost=0",
    f"{LAGRANGIAN} --cost-score harm --score-weights cost=0": "must give harm=0, as --algorithm ppo-lagrangian",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refused(flags):
    (error,) = cost_score(Job(load(flags), None, None, 1, {}))
    assert REFUSED[flags] in error and "Try --score-weights" in error


@pytest.mark.parametrize("flags", ["", "--algorithm ppo", f"{LAGRANGIAN} --score-weights cost=0 help=2"])
def test_allowed(flags):
    assert [*cost_score(Job(load(flags), None, None, 1, {}))] == []


def test_the_cost_critic_is_where_the_critic_is_and_has_its_model():
    config = load(f"{LAGRANGIAN} --score-weights cost=0 --critic-ranks 1 --critic-lr 0.5")
    placed, errors = place(config, 2)
    assert errors == [] and placed["critic"] == placed["cost_critic"] == (1,)
    assert list(placed) == ["actor", "critic", "cost_critic", "rollout"]
    models = trained_models(config)
    assert models["cost_critic"] == models["critic"] and models["critic"].optimizer.lr == 0.5
    assert "cost_critic" not in place(load("--algorithm ppo"), 2)[0]
