"""Settings that have no value, are switched off, or are not read where they stand: what megarl refuses is not
written. `pytest tests/translate/test_without_effect.py`"""

import shlex

import pytest

from megarl import cli
from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.frameworks.rows import Settings
from megarl.translate.arguments import write_arguments
from megarl.translate.framework import SLIME, TRL, VERL, Source

ROWS = 17917
BASES = {
    "verl": (VERL, {"algorithm.adv_estimator": "gae", "data.train_batch_size": 256}),
    "slime": (SLIME, {"rollout-batch-size": 32, "n-samples-per-prompt": 8, "num-rollout": 100}),
    "trl": (TRL, {"per_device_train_batch_size": 8, "use_vllm": True, "use_peft": True, "lora_r": 8}),
}
NEEDED = "--model m --train-data d --save s --train-iters 3".split()


@pytest.mark.parametrize("framework, base", BASES.values(), ids=BASES)
def test_a_setting_without_a_value_never_becomes_a_flag_that_takes_none(framework, base):
    """null in YAML."""
    names = [name for row in framework.table for name in row.names.split() if "*" not in name]
    assert len(names) > 50
    for name in names:
        text = write_arguments(Source(framework, base | {name: None}), REGISTRY, ROWS, 8)
        words = shlex.split(text, comments=True)
        assert not any("None" in word for word in words), text
        flags = [flag for flag in words if flag.startswith("--")]
        needed = [
            word for pair in zip(*[iter(NEEDED)] * 2, strict=True) if pair[0] not in flags for word in pair
        ]
        load_config([*words, *needed], REGISTRY)


def test_a_clip_that_is_null_hides_no_other(translate):
    flags, _ = translate("--", f"{ACTOR}.grad_clip=null", f"{ACTOR}.optim.clip_grad=0.5")
    assert flags["--clip-grad"] == ["0.5"]


@pytest.fixture
def is_accepted(tmp_path, local, capsys):
    """Whether `megarl check` accepts what a command becomes, with small local files."""

    def accepted(text: str) -> bool:
        (tmp_path / "run.sh").write_text(text)
        assert cli.main(["translate", "--rows", str(ROWS), str(tmp_path / "run.sh")]) == 0
        translated = capsys.readouterr().out
        (tmp_path / "translated.args").write_text(translated)
        argv = ["check", "--gpu-memory", "80", f"@{tmp_path / 'translated.args'}", *local(translated)]
        code = cli.main(argv)
        print(capsys.readouterr().err, translated)
        return code == 0

    return accepted


VERL_RUN = (
    "python3 -m {} algorithm.adv_estimator=grpo data.train_batch_size={} actor_rollout_ref.rollout.n=8 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=32 trainer.total_epochs=1 {}"
)
MAIN, ONE_STEP = "verl.trainer.main_ppo", "recipe.one_step_off_policy.main_ppo"
FULLY = "verl.experimental.fully_async_policy.fully_async_main"
SLIME_RUN = (
    "python3 {} --advantage-estimator grpo --hf-checkpoint /m --prompt-data d.jsonl --rollout-batch-size 32 "
    "--n-samples-per-prompt 8 --num-rollout 10 --global-batch-size 256 --rollout-max-response-len 64 {}"
)
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
ACTOR = "actor_rollout_ref.actor"
REPLAY = f"{ACTOR}.router_replay.mode=R3 {ACTOR}.megatron.expert_model_parallel_size=2"
CPU_OFFLOAD = f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True"


@pytest.mark.parametrize(
    "text",
    [
        VERL_RUN.format(MAIN, 128, BYPASS),
        VERL_RUN.format(ONE_STEP, 128, BYPASS),
        VERL_RUN.format(ONE_STEP, 128, REPLAY),
        VERL_RUN.format(FULLY, 0, BYPASS),
        VERL_RUN.format(MAIN, 128, "algorithm.filter_groups.max_num_gen_batches=10"),
        VERL_RUN.format(MAIN, 128, "actor_rollout_ref.rollout.name=hf"),
        VERL_RUN.format(MAIN, 128, CPU_OFFLOAD),
        SLIME_RUN.format("train_async.py", "--use-rollout-logprobs"),
        SLIME_RUN.format("train.py", "--use-rollout-logprobs"),
    ],
    ids="sync one-step replay fully no-filter hf cpu-offload slime-async slime-sync".split(),
)
def test_the_translation_passes_check(text, is_accepted):
    assert is_accepted(text)


def test_log_probs_of_the_engine_are_old_ones_in_synchronous_training_only(translate, tmp_path):
    for command, is_taken in (
        (VERL_RUN.format(MAIN, 128, BYPASS), True),
        (VERL_RUN.format(ONE_STEP, 128, BYPASS), False),
        (SLIME_RUN.format("train.py", "--use-rollout-logprobs"), True),
        (SLIME_RUN.format("train_async.py", "--use-rollout-logprobs"), False),
    ):
        (tmp_path / "run.sh").write_text(command)
        flags, comments = translate(tmp_path / "run.sh")
        assert flags.get("--old-log-probs") == (["engine"] if is_taken else None)
        assert ("is needed with --staleness" in comments) is not is_taken
    assert "--staleness" not in translate("--", BYPASS.replace("True", "False"))[1]


@pytest.mark.parametrize(
    "program, expected",
    [(MAIN, None), (ONE_STEP, ["wait"]), (FULLY, None)],
)
def test_whether_responses_end_before_the_weights_change(translate, tmp_path, program, expected):
    (tmp_path / "run.sh").write_text(VERL_RUN.format(program, 128, ""))
    assert translate(tmp_path / "run.sh")[0].get("--weight-update") == expected


def test_a_step_of_fully_asynchronous_training_is_what_comes_between_two_weight_updates(translate, tmp_path):
    """It does not read data.train_batch_size."""
    words = "async_training.require_batches=2 rollout.total_rollout_steps=5120"
    (tmp_path / "run.sh").write_text(VERL_RUN.format(FULLY, 0, words))
    flags, comments = translate(tmp_path / "run.sh")
    assert flags["--num-prompts"] == ["256"] and flags["--train-iters"] == ["20"]  # 32 x 2 x 4, 5120 / 256
    assert "require_batches=2" not in comments
    few = translate("--rows", "1024", tmp_path / "run.sh")[0]  # it ends with the data
    assert few["--train-iters"] == ["4"]
    (tmp_path / "run.sh").write_text(VERL_RUN.format(ONE_STEP, 128, words))
    assert translate(tmp_path / "run.sh")[0]["--num-prompts"] == ["128"]


@pytest.mark.parametrize(
    "enable, rounds, expected",
    [("True", 10, ["10"]), ("True", 0, ["1000"]), ("True", -1, ["1000"]), ("False", 10, None)],
)
def test_rounds_of_sampling_need_a_filter(translate, enable, rounds, expected):
    filtered = "algorithm.filter_groups"
    flags, _ = translate("--", f"{filtered}.enable={enable}", f"{filtered}.max_num_gen_batches={rounds}")
    assert flags.get("--max-sampling-rounds") == expected and ("--dynamic-sampling" in flags) is bool(
        expected
    )


def test_settings_are_what_is_given():
    """None that is given turns a default off."""
    settings = Settings({"trainer.nnodes": None}, VERL.table)
    assert settings["trainer.nnodes"] is None and settings["trainer.n_gpus_per_node"] == 8


def test_fewer_rows_than_a_batch_are_no_steps_and_said(translate):
    flags, comments = translate("--rows", "100", "--", "data.train_batch_size=128", "trainer.total_epochs=2")
    assert "--train-iters" not in flags and "trainer.total_epochs 2 x (100 rows // 128) is 0" in comments
