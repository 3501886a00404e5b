"""What verl's rollout correction, its critic, its clip range and its configuration files become."""

import math

import pytest

from tests.translate.conftest import of_file

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
GRPO, GAE = "algorithm.adv_estimator=grpo", "algorithm.adv_estimator=gae"
CORRECTION_FLAGS = (
    "--tis-clip",
    "--tis-level",
    "--mis-level",
    "--mis-low",
    "--mis-high",
    "--token-veto",
    "--old-log-probs",
    "--policy-loss",
)


def correction_of(translate, words):
    flags, comments = translate(
        "--", GRPO, *(f"{CORRECTION}.{word}" if "." not in word.split("=")[0] else word for word in words)
    )
    return {flag[2:]: flags[flag] for flag in CORRECTION_FLAGS if flag in flags}, comments


@pytest.mark.parametrize(
    "words, expected",
    [
        (["rollout_is_threshold=2.0"], {}),  # without rollout_is nothing is weighed
        (["rollout_is=null", "rollout_is_threshold=2.0"], {}),
        (["rollout_is=token"], {"tis-clip": ["2.0"], "tis-level": ["token"]}),
        (["rollout_is=token", "rollout_is_threshold=null"], {}),
        (["rollout_is=sequence", "rollout_is_threshold=5"], {"tis-clip": ["5"], "tis-level": ["sequence"]}),
        (["rollout_rs=seq_mean_k3", "rollout_rs_threshold=0.01"], {}),
        (
            ["rollout_rs=sequence", "rollout_is_threshold=4"],  # the names before January 2026
            {"mis-level": ["sequence"], "mis-low": ["0.25"], "mis-high": ["4"]},
        ),
        (
            ["rollout_rs=geometric", "rollout_rs_threshold=1.01", "rollout_rs_threshold_lower=0.98"],
            {"mis-level": ["geometric"], "mis-low": ["0.98"], "mis-high": ["1.01"]},
        ),
        (["rollout_token_veto_threshold=1e-4"], {"token-veto": ["0.0001"]}),
        (["bypass_mode=True", "rollout_is=token"], {"old-log-probs": ["engine"]}),
        (
            ["bypass_mode=True", f"{ACTOR}.policy_loss.loss_mode=gspo"],
            {"old-log-probs": ["engine"], "policy-loss": ["ppo"]},
        ),
        (
            ["bypass_mode=True", "loss_type=reinforce", "rollout_is=sequence"],
            {"policy-loss": ["reinforce"], "tis-clip": ["2.0"], "tis-level": ["sequence"]},
        ),
        (["algorithm.rollout_is_threshold=3"], {}),  # 0.6.0 only measured without algorithm.rollout_is
        (
            ["algorithm.rollout_is_threshold=3", "algorithm.rollout_is=True"],
            {"tis-clip": ["3"], "tis-level": ["token"]},
        ),
        ([f"{ACTOR}.tis_imp_ratio_cap=-1"], {}),
        ([f"{ACTOR}.tis_imp_ratio_cap=2"], {"tis-clip": ["2"], "tis-level": ["token"]}),
    ],
)
def test_verls_rollout_correction(translate, words, expected):
    assert correction_of(translate, words)[0] == expected


@pytest.mark.parametrize(
    "option, level", [("token_k1", "token"), ("seq_sum_k1", "sequence"), ("seq_mean_k1", "geometric")]
)
@pytest.mark.parametrize("threshold, bounds", [("0.5_4", (0.5, 4.0)), ("2.5", (1 / 2.5, 2.5))])
def test_verls_masks_keep_the_same_ratios(translate, option, level, threshold, bounds):
    """verl bounds k1, the log of engine / trainer, and megarl the ratio trainer / engine."""
    flags, _ = correction_of(translate, [f"rollout_rs={option}", f"rollout_rs_threshold={threshold}"])
    assert flags["mis-level"] == [level]
    low, high = float(flags["mis-low"][0]), float(flags["mis-high"][0])
    ratios = [math.exp(step / 100 + 0.001) for step in range(-300, 300)]
    kept_there = [math.log(bounds[0]) <= -math.log(ratio) <= math.log(bounds[1]) for ratio in ratios]
    assert kept_there == [low <= ratio <= high for ratio in ratios] and {*kept_there} == {True, False}


def test_verls_masks_without_a_counterpart_are_comments(translate):
    words = ["rollout_rs=token_k1,seq_max_k2", "rollout_rs_threshold=2,0.1"]
    flags, comments = correction_of(translate, words)
    assert flags["mis-high"] == ["2.0"]
    assert "rollout_rs=seq_max_k2: --mis-level takes one criterion, token_k1 here" in comments
    assert "token_k1, seq_sum_k1 and seq_mean_k1" in correction_of(translate, ["rollout_rs=token_k3"])[1]


OF_ACTOR = [
    "actor_rollout_ref.model.lora_rank=32",
    "actor_rollout_ref.model.target_modules=[q_proj,linear_fc2,lm_head]",
    f"{ACTOR}.grad_clip=0.3",
    f"{ACTOR}.optim.weight_decay=0.1",
    f"{ACTOR}.optim.betas=[0.9,0.95]",
    f"{ACTOR}.optim.lr_warmup_steps=10",
    f"{ACTOR}.optim.min_lr_ratio=0.1",
    f"{ACTOR}.optim.lr_decay_steps=70",
    f"{ACTOR}.optim.lr_scheduler_type=cosine",
]


@pytest.mark.parametrize(
    "words, expected",
    [
        (
            OF_ACTOR,
            {
                "--critic-clip-grad": ["1.0"],
                "--critic-weight-decay": ["0.01"],
                "--critic-adam-beta1": ["0.9"],
                "--critic-adam-beta2": ["0.999"],
                "--critic-lr": ["1e-05"],
                "--critic-lr-decay-style": ["constant"],
                "--critic-lr-warmup-iters": ["0"],
                "--critic-min-lr": ["0.0"],
                "--critic-lr-decay-iters": ["none"],
            },
        ),
        (
            [
                "critic.model.lora_rank=8",
                "critic.optim.lr_warmup_steps=4",
                "critic.optim.clip_grad=0.5",
                "critic.optim.betas=[0.8,0.9]",
            ],
            {
                "--critic-lora-rank": ["8"],
                "--critic-lora-alpha": ["16"],
                "--critic-lr": ["1e-05"],
                "--critic-lr-decay-style": ["constant"],
                "--critic-lr-warmup-iters": ["4"],
                "--critic-clip-grad": ["0.5"],
                "--critic-adam-beta1": ["0.8"],
                "--critic-adam-beta2": ["0.9"],
            },
        ),
    ],
    ids=["actor", "critic"],
)
def test_verls_critic_has_settings_of_its_own(translate, words, expected):
    flags, _ = translate("--", GAE, *words)
    found = {flag: words for flag, words in flags.items() if flag.startswith("--critic-")}
    assert found == expected | {"--critic-warmup-iters": ["0"]}
    assert "--lora-rank" not in flags and ("--actor-lora-rank" in flags) is (words is OF_ACTOR)
    without_critic, _ = translate("--", GRPO, *words)
    assert not any(flag.startswith("--critic-") for flag in without_critic)


def test_a_warm_up_in_unknown_steps_is_the_actors_only(translate):
    flags, comments = translate("--", GAE, f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1")
    assert "--lr-warmup-iters = 0.1 x --train-iters" in comments and "--lr-warmup-iters" not in flags
    assert flags["--critic-lr-warmup-iters"] == ["0"]


def test_adapters_by_megatrons_names(translate):
    words = ["actor_rollout_ref.model.lora.rank=8", *OF_ACTOR[1:2]]
    flags, comments = translate(
        "--", GRPO, *words, "actor_rollout_ref.model.lora.target_modules=[linear_qkv,x]"
    )
    assert flags["--lora-alpha"] == ["32"] and flags["--lora-target-modules"] == ["linear_qkv"]
    assert "x: --lora-target-modules has no such layer" in comments and "k_proj" not in comments
    flags, comments = translate("--", GRPO, *OF_ACTOR[:2])
    assert flags["--lora-target-modules"] == ["linear_qkv", "linear_fc2"]
    assert "has k_proj v_proj too" in comments and "lm_head: --lora-target-modules has no such" in comments


@pytest.mark.parametrize(
    "words, is_noted", [(["clip_ratio=0.4"], True), (["clip_ratio=0.2"], False), ([], False)]
)
def test_a_clip_ratio_that_verl_does_not_read_is_noted(translate, words, is_noted):
    _, comments = translate("--", GRPO, *(f"{ACTOR}.{word}" for word in words))
    assert ("clip_ratio=0.4 has no effect in verl: clip_ratio_low (0.2)" in comments) is is_noted


def test_kl_estimates_of_verl_that_differ_here(translate):
    in_loss = [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=full"]
    flags, comments = translate("--", GRPO, *in_loss)
    assert flags["--kl-estimator"] == ["k3"] and "the nearest to full" in comments
    flags, _ = translate("--", GRPO, "algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=k3+")
    assert flags["--kl-mode"] == ["reward"] and "--kl-straight-through" not in flags


def test_timeouts_and_turns_of_verl_are_comments(translate):
    words = ["actor_rollout_ref.nccl_timeout=600", "actor_rollout_ref.rollout.multi_turn.enable=True"]
    flags, comments = translate("--", GRPO, *words)
    assert "--call-timeout-s" not in flags and "a timeout of single collectives" in comments
    assert "--env FILE.py:CLASS or --agent-command" in comments


COMMAND = "python3 -m verl.trainer.main_ppo {} algorithm.adv_estimator=grpo trainer.nnodes=1"


@pytest.mark.parametrize(
    "options, name",
    [
        ("--config-path=config --config-name='ppo_megatron_trainer.yaml'", None),
        ("--config-path=./config --config-name ppo_trainer", None),
        ("", None),
        ("--config-name='gsm8k_multiturn_grpo'", "--config-name gsm8k_multiturn_grpo"),
        ("--config-name gsm8k_multiturn_grpo", "--config-name gsm8k_multiturn_grpo"),
        ("-cn dapo_trainer", "-cn dapo_trainer"),
        ("--config-dir /mine", "--config-dir /mine"),
        ("--config-path=/mine --config-name=ppo_trainer", "--config-path /mine"),
    ],
)
def test_another_configuration_of_a_verl_command_is_a_remark(translate, tmp_path, options, name):
    _, comments = of_file(translate, tmp_path, "run.sh", COMMAND.format(options))
    _, of_words = translate("--", *options.split(), GRPO)
    for text in (comments, of_words):
        assert ("names another configuration" in text) is (name is not None)
    assert name is None or f"`{name}` names another configuration, which is not read" in comments
