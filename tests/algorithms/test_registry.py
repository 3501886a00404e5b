"""What the configuration needs of the algorithms: light to import, fields that agree with the kernels, errors
that name flags."""

import dataclasses
import math
import subprocess
import sys
import typing

import pytest

from megarl.algorithms import GRPO, PPO, REGISTRY, SFT, Algorithm
from megarl.kernels.aggregate import LossAggregation
from megarl.kernels.kl import KLEstimator


def test_importing_and_building_them_needs_no_torch():
    code = (
        "import sys; from megarl.algorithms import REGISTRY; algorithms = [cls() for cls in "
        "REGISTRY.values()];"
        "[(a.needs_rollout, a.needs_critic, a.needs_reference, a.needs_entropy, a.advantage_reads, "
        "a.build_kl_controller()) for a in algorithms];"
        "assert 'torch' not in sys.modules and 'megarl.kernels' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_each_is_a_frozen_dataclass_with_defaults():
    assert (
        list(REGISTRY)
        == "grpo rloo remax reinforce++ reinforce++-baseline opo maxrl gdpo ppo ppo-lagrangian raft online-dpo distill gkd sft dpo ipo kto simpo orpo rpo "
        "bradley-terry".split()
    )
    for cls in REGISTRY.values():
        assert issubclass(cls, Algorithm) and cls.__dataclass_params__.frozen
        assert all(field.default is not dataclasses.MISSING for field in dataclasses.fields(cls))
        assert cls.paper and cls.advantage_formula
        assert not hasattr(cls(), "__dict__")  # slots: a misspelt attribute is an error


def test_choices_are_those_of_the_kernels():
    hints = typing.get_type_hints(GRPO)
    assert hints["loss_aggregation"] == LossAggregation and hints["kl_estimator"] == KLEstimator


def test_needs():
    assert (SFT().needs_rollout, SFT().needs_reference, SFT().needs_entropy) == (False, False, False)
    assert (GRPO().needs_rollout, GRPO().needs_reference, GRPO().needs_entropy) == (True, False, False)
    assert [cls().needs_critic for cls in (SFT, GRPO, PPO)] == [False, False, True]
    for kl_mode in ("loss", "reward"):
        assert GRPO(kl_mode=kl_mode, kl_coef=0.1).needs_reference
    assert GRPO(entropy_coef=0.01).needs_entropy and GRPO(entropy_coef=-0.01).needs_entropy


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(kl_mode="loss"), r"kl_coef \(0.0\): must be above 0 with --kl-mode loss. Try 0.001"),
        (dict(kl_mode="reward"), r"kl_coef \(0.0\)"),
        (dict(kl_coef=0.1), r"kl_coef \(0.1\): must be 0 with --kl-mode none"),
        (dict(kl_coef=-0.1, kl_mode="loss"), r"kl_coef \(-0.1\): must be at least 0"),
        (dict(kl_coef=math.nan, kl_mode="loss"), r"kl_coef \(nan\)"),
        (dict(kl_mode="both", kl_coef=0.1), r"kl_mode \(both\): must be none, loss or reward"),
        (dict(kl_estimator="k4"), r"kl_estimator \(k4\): must be k1, abs, k2 or k3\."),
        (
            dict(loss_aggregation="mean"),
            r"loss_aggregation \(mean\): must be token-mean, seq-mean-token-mean,",
        ),
        (dict(old_log_probs="mine"), r"old_log_probs \(mine\): must be trainer, engine or interpolated\."),
        (dict(clip_eps_low=1.5), r"clip_eps_low \(1.5\): must be at most 1"),
        (dict(clip_eps_high=-0.1), r"clip_eps_high \(-0.1\)"),
        (dict(clip_ratio_c=1.0), r"clip_ratio_c \(1.0\): must be above 1"),
        (dict(tis_clip=0.0), r"tis_clip \(0.0\): must be above 0"),
        (dict(entropy_coef=math.nan), r"entropy_coef \(nan\)"),
        (
            dict(policy_loss="cispo", clip_ratio_c=3.0),
            r"clip_ratio_c \(3.0\): is not for --policy-loss cispo",
        ),
        (dict(policy_loss="vpg"), r"policy_loss \(vpg\): must be one of ppo, cispo, reinforce, sapo"),
        (dict(kl_straight_through=True), r"kl_straight_through \(True\): needs --kl-mode loss"),
        (
            dict(kl_straight_through=True, kl_mode="reward", kl_coef=0.1),
            r"kl_straight_through \(True\): needs --kl-mode loss",
        ),
        (dict(kl_controller="adaptive"), r"kl_controller \(adaptive\): needs --kl-mode loss or reward"),
        (dict(kl_controller="none"), r"kl_controller \(none\): must be fixed or adaptive"),
        (dict(kl_target=0.0), r"kl_target \(0.0\): must be above 0"),
        (dict(kl_horizon=0), r"kl_horizon \(0\): must be above 0"),
        (dict(clip_eps_low=-1.0, tis_clip=-1.0), r"clip_eps_low \(-1.0\).*tis_clip \(-1.0\)"),  # all at once
    ],
)
@pytest.mark.parametrize("cls", [GRPO, PPO])
def test_contradictions_are_refused(cls, fields, message):
    with pytest.raises(ValueError, match=message):
        cls(**fields)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(gamma=1.1), r"gamma \(1.1\): must be at most 1"),
        (dict(gae_lambda=-0.1), r"gae_lambda \(-0.1\): must be at least 0"),
        (dict(gae_lambda=math.nan), r"gae_lambda \(nan\)"),
        (dict(value_clip_eps=0.0), r"value_clip_eps \(0.0\): must be above 0"),
        (dict(critic_warmup_iters=-1), r"critic_warmup_iters \(-1\): must be at least 0"),
        (dict(gamma=-1.0, clip_eps_low=-1.0), r"clip_eps_low \(-1.0\).*gamma \(-1.0\)"),  # all at once
    ],
)
def test_ppo_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        PPO(**fields)
    assert PPO(value_clip_eps=None).value_clip_eps is None
