"""KL controllers against the formula of arXiv:1909.08593, section 2.2, and on a policy whose KL falls as the
factor rises.

pytest tests/algorithms/test_kl_controller.py
"""

import math

import pytest

from megarl.algorithms import GRPO, PPO, SFT
from megarl.algorithms.kl_controller import AdaptiveKLController, FixedKLController


@pytest.mark.parametrize(
    "kl, error", [(6.0, 0.0), (6.6, 0.1), (5.4, -0.1), (60.0, 0.2), (0.0, -0.2), (-3.0, -0.2), (7.2, 0.2)]
)
def test_one_step_is_the_papers(kl, error):
    """With 512 samples and a horizon of 5120 the gain is the paper's K = 0.1."""
    controller = AdaptiveKLController(0.3, target=6.0, horizon=5120)
    controller.update(kl, 512)
    assert controller.coef == pytest.approx(0.3 * (1 + 0.1 * error), rel=1e-12)


def test_speed_is_per_sample():
    big, small = (AdaptiveKLController(0.3, target=6.0, horizon=100_000) for _ in range(2))
    big.update(9.0, 1000)
    for _ in range(100):
        small.update(9.0, 10)
    assert small.coef == pytest.approx(big.coef, rel=1e-5)


def test_holds_the_target():
    controller = AdaptiveKLController(1e-3, target=6.0, horizon=1000)
    for _ in range(2000):
        controller.update(0.6 / controller.coef, 64)
    assert controller.coef == pytest.approx(0.1, rel=1e-3)


def test_state_goes_on_where_it_was():
    first, second = (AdaptiveKLController(0.3, target=6.0, horizon=100) for _ in range(2))
    first.update(9.0, 10)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(1.0, 10)
    assert first.coef == second.coef != 0.3 and first.state_dict() == {"coef": first.coef}


def test_fixed_stays():
    controller = FixedKLController(0.3)
    controller.update(math.nan, 10)
    controller.load_state_dict({"coef": 0.7})
    assert controller.coef == 0.3


@pytest.mark.parametrize("state", [FixedKLController(0.0).state_dict(), {"coef": 0.0}], ids=["now", "before"])
def test_a_controller_that_follows_a_run_without_kl_begins_at_its_own_coefficient(state):
    controller = AdaptiveKLController(0.01, target=6.0, horizon=100)
    controller.load_state_dict(state)
    controller.update(60.0, 10)
    assert controller.coef == pytest.approx(0.01 * 1.02)


def test_what_cannot_be_is_refused():
    controller = AdaptiveKLController(0.3, target=6.0, horizon=100)
    with pytest.raises(ValueError, match=r"measured_kl \(nan\) must be finite"):
        controller.update(math.nan, 10)
    with pytest.raises(
        ValueError, match=r"kl_horizon \(100\) must be above 0.2 x samples per step \(500\).*Try 5000"
    ):
        controller.update(6.0, 500)
    controller.update(0.0, 499)
    assert controller.coef > 0


@pytest.mark.parametrize("cls", [GRPO, PPO])
def test_the_flags_build_it(cls):
    assert type(cls().build_kl_controller()) is FixedKLController and cls().build_kl_controller().coef == 0
    assert cls(kl_mode="loss", kl_coef=0.2).build_kl_controller().coef == 0.2
    adaptive = cls(
        kl_mode="reward", kl_coef=0.2, kl_controller="adaptive", kl_target=3.0, kl_horizon=77
    ).build_kl_controller()
    assert (type(adaptive), adaptive.coef, adaptive.target, adaptive.horizon) == (
        AdaptiveKLController,
        0.2,
        3.0,
        77,
    )
    assert SFT().build_kl_controller().coef == 0
