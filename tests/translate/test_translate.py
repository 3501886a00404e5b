"""What settings of other frameworks mean, how their files are read, and how `megarl translate` fails."""

import json
import re
import shlex
from pathlib import Path

import pytest

from megarl import cli
from megarl.config.args_file import Reader
from megarl.frameworks import others, slime, trl, verl
from megarl.frameworks.answers import find_row
from megarl.translate.shell import Script


@pytest.fixture
def translate(capsys):
    """translate(arguments ...) -> (flag -> its words, all comments) of the printed args file."""

    def run(*argv):
        assert cli.main(["translate", *map(str, argv)]) == 0
        text = capsys.readouterr().out
        flags = {}
        for line in text.splitlines():
            if words := shlex.split(line, comments=True):
                assert words[0] not in flags, f"{words[0]} is written twice"
                flags[words[0]] = words[1:]
        return flags, "\n".join(line.partition("#")[2].strip() for line in text.splitlines() if "#" in line)

    return run


def of_verl(translate, *words, rows=None):
    return translate(*(("--rows", rows) if rows else ()), "--", *words)


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    "words, expected",
    [
        # verl counts the prompts of a mini-batch, megarl its samples
        ([f"{ACTOR}.ppo_mini_batch_size=8", f"{ROLLOUT}.n=5"], {"--global-batch-size": ["40"]}),
        ([f"{ACTOR}.ppo_mini_batch_size=8"], {"--global-batch-size": ["8"]}),
        (
            [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.01"],
            {"--kl-mode": ["loss"], "--kl-coef": ["0.01"]},
        ),
        ([f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=kl"], {"--kl-estimator": ["k1"]}),
        ([f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=k3+"], {"--kl-straight-through": []}),
        (
            ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.02"],
            {"--kl-mode": ["reward"], "--kl-coef": ["0.02"], "--kl-estimator": ["k1"]},
        ),
        (
            [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.0"],
            {"--kl-mode": ["none"], "--kl-coef": None},
        ),
        ([f"{ACTOR}.clip_ratio_high=0.28"], {"--clip-eps-high": ["0.28"]}),
        ([f"{ACTOR}.clip_ratio=0.1"], {"--clip-eps-low": ["0.1"], "--clip-eps-high": ["0.1"]}),
        ([f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"], {"--loss-aggregation": ["dr-grpo"]}),
        (
            ["algorithm.adv_estimator=gae"],
            {"--algorithm": ["ppo"], "--gae-lambda": ["1.0"], "--critic-lr": ["1e-05"]},
        ),
        (["algorithm.adv_estimator=rloo"], {"--algorithm": ["rloo"], "--clip-eps-low": ["0.2"]}),
        (
            [f"{ACTOR}.policy_loss.loss_mode=dppo_tv", f"{ACTOR}.clip_ratio=0.15"],
            {"--policy-loss": ["dppo-tv"], "--dppo-threshold": ["0.15"], "--clip-eps-low": None},
        ),
        (
            [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.clip_ratio_low=3e-4"],
            {"--policy-loss": ["gspo"], "--clip-eps-low": ["3e-4"], "--clip-ratio-c": None},
        ),
        ([f"{ACTOR}.policy_loss.loss_mode=sapo"], {"--policy-loss": ["sapo"], "--clip-eps-low": None}),
        (["algorithm.norm_adv_by_std_in_grpo=False"], {"--no-normalize-advantages-by-std": []}),
        (
            [f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1", "trainer.total_training_steps=50"],
            {"--lr-warmup-iters": ["5"], "--train-iters": ["50"]},
        ),
        ([f"{ACTOR}.optim.lr=2e-6", f"{ACTOR}.optim.min_lr_ratio=0.1"], {"--min-lr": ["2e-07"]}),
        ([f"{ACTOR}.optim.lr_warmup_steps=10"], {"--lr-warmup-iters": ["10"]}),
        (
            [f"{ACTOR}.ppo_max_token_len_per_gpu=1000", f"{ACTOR}.ulysses_sequence_parallel_size=4"],
            {"--context-parallel-size": ["4"], "--max-tokens-per-micro-batch": ["4000"]},
        ),
        (["trainer.nnodes=2", "trainer.n_gpus_per_node=4"], {"--nproc-per-node": ["8"]}),
        ([f"{ROLLOUT}.top_k=-1", f"{ROLLOUT}.temperature=0.6"], {"--temperature": ["0.6"], "--top-k": ["0"]}),
        (
            ["trainer.save_freq=-1", "trainer.test_freq=-1"],
            {"--save-interval": ["0"], "--eval-interval": ["0"]},
        ),
        (["trainer.logger=['console','mlflow']"], {"--log-with": ["mlflow"]}),
        (["trainer.resume_mode=disable"], {"--load": None}),
        (
            ["custom_reward_function.path=r.py", "custom_reward_function.name=f"],
            {"--reward-function": ["r.py:f"]},
        ),
        (["+data.seed=7"], {"--seed": ["7"]}),
        ([f"{ACTOR}.optim.betas=[0.9,0.98]"], {"--adam-beta2": ["0.98"]}),
    ],
)
def test_verl(translate, words, expected):
    if not words[0].startswith("algorithm.adv"):
        words = ["algorithm.adv_estimator=grpo", *words]
    flags, _ = of_verl(translate, *words)
    assert {flag: flags.get(flag) for flag in expected} == expected


def test_passes_over_the_data_become_steps(translate):
    words = ["trainer.total_epochs=3", "data.train_batch_size=100"]
    assert of_verl(translate, *words, rows=1050)[0]["--train-iters"] == ["30"]
    flags, comments = of_verl(translate, *words)
    assert "--train-iters" not in flags
    assert "--train-iters = trainer.total_epochs 3 x (rows of --train-data // 100)" in comments


def test_rows_of_files_that_are_here_are_counted(translate, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n" * 25)
    words = [f"data.train_files={data}", "data.train_batch_size=10", "trainer.total_epochs=4"]
    assert of_verl(translate, *words)[0]["--train-iters"] == ["8"]


def test_no_setting_is_dropped(translate):
    _, comments = of_verl(translate, "trainer.totl_epochs=3", "data.truncation=error", "data.shuffle=False")
    assert "not known here; the nearest known is trainer.total_epochs:\ntrainer.totl_epochs=3" in comments
    assert "remove such rows from the data:\ndata.truncation=error" in comments


def test_a_setting_without_effect_is_a_comment(translate):
    flags, comments = of_verl(
        translate, "algorithm.adv_estimator=grpo", "critic.optim.lr=1e-5", f"{ACTOR}.kl_loss_coef=0.1"
    )
    assert "--critic-lr" not in flags and "--kl-coef" not in flags
    assert f"no effect in this configuration:\ncritic.optim.lr=1e-5\n{ACTOR}.kl_loss_coef=0.1" in comments


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent / "configs").glob("verl_*")), ids=lambda path: path.stem
)
def test_every_setting_of_a_configuration_is_used_or_named(translate, path):
    """A setting's value stands in a comment, or a flag that its row may set is written."""
    words = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    flags, comments = of_verl(translate, *words, rows=1000)
    written = {flag.removeprefix("--").removeprefix("no-") for flag in flags}
    for name in (word.partition("=")[0] for word in words):
        row = next((row for row in verl.TABLE if row.has(name)), None)
        used = row is not None and (bool(row.flags_here() & written) or (row.lines and not row.flags))
        defaults = row is not None and row.flags == "{}" and row.lines is None
        assert used or defaults or f"{name}=" in comments, name


def of_file(translate, tmp_path, name, text, *options):
    path = tmp_path / name
    path.write_text(text)
    return translate(*options, path)


TRL = "num_generations: 4\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 8\n"


@pytest.mark.parametrize(
    "more, expected",
    [
        ("", {"--num-prompts": ["8"], "--num-samples-per-prompt": ["4"], "--global-batch-size": ["32"]}),
        ("steps_per_generation: 16", {"--num-prompts": ["16"], "--global-batch-size": ["32"]}),
        ("generation_batch_size: 128", {"--num-prompts": ["32"], "--global-batch-size": ["32"]}),
        ("max_steps: 100", {"--train-iters": ["100"]}),
        ("max_steps: 100\nnum_iterations: 2", {"--train-iters": ["50"], "--num-epochs": ["2"]}),
        ("max_steps: 100\nsteps_per_generation: 16\nwarmup_steps: 10\nsave_steps: 20",
         {"--train-iters": ["50"], "--lr-warmup-iters": ["5"], "--save-interval": ["10"]}),
        ("max_steps: 100\nwarmup_ratio: 0.1", {"--lr-warmup-iters": ["10"], "--lr-decay-style": ["linear"]}),
        ("beta: 0.04", {"--kl-mode": ["loss"], "--kl-coef": ["0.04"], "--kl-estimator": ["k3"]}),
        ("beta: 0.0", {"--kl-mode": ["none"]}),
        ("loss_type: grpo", {"--loss-aggregation": ["seq-mean-token-mean"]}),
        ("loss_type: cispo\nepsilon_high: 5.0", {"--policy-loss": ["cispo"], "--clip-eps-high": ["5.0"]}),
        ("scale_rewards: false", {"--no-normalize-advantages-by-std": []}),
        ("delta: 4.0", {"--clip-ratio-c": ["4.0"]}),
        ("learning_rate: 2e-6", {"--lr": ["2e-6"]}),
        ("use_vllm: true", {"--tis-clip": ["2.0"], "--rollout-gpu-memory-utilization": ["0.3"]}),
        ("report_to: [wandb, trackio]", {"--log-with": ["wandb"]}),
        ("use_peft: true\nlora_target_modules: [q_proj, v_proj]", {"--lora-target-modules": ["linear_qkv"]}),
        ("num_train_epochs: 2", {"--train-iters": ["24"]}),
    ],
)  # fmt: skip
def test_trl(translate, tmp_path, more, expected):
    flags, _ = of_file(translate, tmp_path, "grpo.yaml", TRL + more, "--ranks", 2, "--rows", 100)
    assert {flag: flags.get(flag) for flag in expected} == expected


@pytest.mark.parametrize("value, is_noted", [("batch", True), ("group", False), ("false", False)])
def test_trls_scale_over_the_batch_is_noted(translate, tmp_path, value, is_noted):
    _, comments = of_file(
        translate, tmp_path, "grpo.yaml", TRL + f"scale_rewards: {value}", "--ranks", 2, "--rows", 100
    )
    assert ("the standard deviation is the group's here" in comments) is is_noted


def test_trl_in_json_python_and_a_command_line_agree(translate, tmp_path):
    settings = {"num_generations": 4, "beta": 0.1, "per_device_train_batch_size": 4, "output_dir": "out"}
    python = "from trl import GRPOConfig\nGROUP = 4\nconfig = GRPOConfig(num_generations=GROUP, beta=0.1, "
    python += "per_device_train_batch_size=4, output_dir='out')\n"
    shell = "accelerate launch train.py --num_generations 4 --beta=0.1 \\\n  --per_device_train_batch_size 4 "
    shell += '--output_dir "out"\n'
    results = [
        of_file(translate, tmp_path, "grpo.json", json.dumps(settings)),
        of_file(translate, tmp_path, "grpo.py", python),
        of_file(translate, tmp_path, "grpo.sh", shell),
    ]
    assert results[0] == results[1] == results[2]
    assert results[0][0]["--kl-coef"] == ["0.1"]


def test_a_value_that_is_computed_is_a_comment(translate, tmp_path):
    text = "GRPOConfig(num_generations=8, learning_rate=args.lr, max_completion_length=length - 3)"
    flags, comments = of_file(translate, tmp_path, "grpo.py", text)
    assert "learning_rate: args.lr is no constant; set --lr" in comments
    assert "max_completion_length: length - 3 is no constant; set --max-response-length" in comments
    assert flags["--num-samples-per-prompt"] == ["8"]


SLIME = """
source models/qwen3.sh
BATCH=(
   --rollout-batch-size 32   # prompts
   #--over-sampling-batch-size 64
   --n-samples-per-prompt 8 --num-rollout 3000 --global-batch-size 128 --lr-warmup-iters 10
)
GPUS=${GPUS:-4}
ray job submit --address="http://127.0.0.1" -- python3 train.py --actor-num-gpus-per-node $GPUS \\
   --hf-checkpoint /m ${MODEL_ARGS[@]} ${BATCH[@]} --context-parallel-size 2 \\
   --max-tokens-per-gpu $((1024 * 9)) %s
"""


@pytest.mark.parametrize(
    "more, expected",
    [
        ("--colocate", {"--num-prompts": ["32"], "--global-batch-size": ["128"], "--train-iters": ["3000"]}),
        ("--colocate", {"--nproc-per-node": ["4"], "--rollout-ranks": None, "--lr-warmup-iters": ["5"]}),
        ("--rollout-num-gpus 2", {"--nproc-per-node": ["6"], "--rollout-ranks": ["4-5"]}),
        ("", {"--max-tokens-per-micro-batch": ["18432"], "--context-parallel-size": ["2"]}),
        ("--use-kl-loss --kl-loss-coef 0.01", {"--kl-mode": ["loss"], "--kl-estimator": ["k1"]}),
        ("--use-kl-loss --kl-loss-coef 0.00", {"--kl-mode": ["none"]}),
        ("--eps-clip 0.2 --eps-clip-high 0.28", {"--clip-eps-high": ["0.28"]}),
        ("--calculate-per-token-loss", {"--loss-aggregation": ["token-mean"]}),
        ("", {"--loss-aggregation": ["seq-mean-token-mean"]}),
        ("--use-tis", {"--tis-clip": ["2.0"]}),
        ("--eval-prompt-data aime /d/aime.jsonl", {"--eval-data": ["/d/aime.jsonl"]}),
        ("--sequence-parallel", {"--sequence-parallel": []}),
    ],
)  # fmt: skip
def test_slime(translate, tmp_path, monkeypatch, more, expected):
    monkeypatch.delenv("GPUS", raising=False)
    flags, comments = of_file(translate, tmp_path, "run.sh", SLIME % more)
    assert {flag: flags.get(flag) for flag in expected} == expected
    assert "MODEL_ARGS" in comments and "over-sampling" not in comments


SCRIPT = r"""
set -x
# a comment with key=value: data.seed=1
export LENGTH=$((512 * 2))
home=${DATA_HOME:-"$HOME/verl"}
files="['$home/a.parquet', '$home/b.parquet']"
if [ "$MODE" = "x" ]; then
    n=3
fi
SAMPLING=(
    actor_rollout_ref.rollout.n=4
    "actor_rollout_ref.rollout.temperature=0.7"  # warm
)
SAMPLING+=(actor_rollout_ref.rollout.top_p=1.0)
python3 -m verl.trainer.main_ppo --config-path=config \
    algorithm.adv_estimator=grpo data.train_files="$files" data.max_response_length=$(((LENGTH + 24) / 2)) \
    data.max_prompt_length=${LENGTH} trainer.experiment_name='a b' trainer.nnodes=$NODES \
    "${SAMPLING[@]}" trainer.project_name=p-${LENGTH}-q $@ 2>&1 | tee log.txt
"""


def test_a_shell_script(translate, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    for name in ("DATA_HOME", "NODES", "MODE"):
        monkeypatch.delenv(name, raising=False)
    flags, comments = of_file(translate, tmp_path, "run.sh", SCRIPT)
    assert flags["--train-data"] == ["/h/verl/a.parquet", "/h/verl/b.parquet"]
    assert flags["--max-response-length"] == ["524"]
    assert flags["--max-prompt-length"] == ["1024"]
    assert flags["--num-samples-per-prompt"] == ["4"]
    assert flags["--temperature"] == ["0.7"]
    assert flags["--log-name"] == ["a b"]
    assert flags["--log-project"] == ["p-1024-q"]
    assert "--seed" not in flags
    assert "trainer.nnodes: $NODES is not set in the script" in comments
    assert "conditions or loops" in comments


@pytest.mark.parametrize("line", ["a '' b", 'a="" b', "a='x y'z\"v w\"", r'a "b\"c" d\ e', "a # 'b"])
def test_quoted_words_are_those_of_shlex(line):
    commands = Script(f"x {line}\ny", {}).commands()
    assert commands == [shlex.split(f"x {line}", comments=True), ["y"]]


def test_yaml_of_verl_with_references(translate, tmp_path):
    text = """
defaults: [actor, _self_]
data: {max_prompt_length: 300, train_batch_size: 64}
actor_rollout_ref:
  rollout: {n: 4, prompt_length: "${oc.select:data.max_prompt_length,512}", temperature: "${data.warmth}"}
  actor: {ppo_mini_batch_size: 16, entropy_coeff: 1e-3, grad_clip: "${oc.select:trainer.clip,0.5}"}
algorithm: {adv_estimator: grpo, gamma: null}
"""
    flags, comments = of_file(translate, tmp_path, "ppo.yaml", text)
    assert flags["--global-batch-size"] == ["64"] and flags["--num-prompts"] == ["64"]
    assert flags["--entropy-coef"] == ["1e-3"] and flags["--clip-grad"] == ["0.5"]
    assert (
        "actor_rollout_ref.rollout.temperature: ${data.warmth} cannot be resolved; set --temperature"
        in comments
    )
    assert "defaults" in comments


@pytest.mark.parametrize(
    "name, text, expected",
    [
        (None, None, "No such file or directory. Name a script, a YAML, JSON or Python file."),
        ("a.sh", "echo hello\n", "has no command of verl, TRL or slime"),
        ("a.yaml", "a: [\n", "cannot be parsed"),
        ("a.yaml", "- 1\n", "has no settings by name"),
        ("a.json", "{", "cannot be parsed"),
        ("a.json", '{"epochs": 3}', "has no settings of verl or TRL"),
        ("a.py", "def f(:", "is no Python"),
        ("a.py", "print(3)", "has no GRPOConfig(...)"),
    ],
)
def test_a_file_that_cannot_be_translated(tmp_path, capsys, name, text, expected):
    path = tmp_path / (name or "absent.sh")
    if text is not None:
        path.write_text(text)
    assert cli.main(["translate", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"FILE ({path}): " in error and expected in error


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--", "data.seed"], "-- (data.seed): must be key=value"),
        (["--rows", "0", "--", "data.seed=1"], "--rows (0): must be at least 1. Try 1000."),
    ],
)
def test_words_that_cannot_be_translated(capsys, argv, expected):
    assert cli.main(["translate", *argv]) == 2
    assert expected in capsys.readouterr().err


TABLES = {"verl": verl.TABLE, "TRL": trl.TABLE, "slime": slime.TABLE, "others": others.TABLE}


@pytest.mark.parametrize("name", TABLES)
def test_no_name_has_two_rows(name):
    names = [one for row in TABLES[name] for one in row.names.split() if "*" not in one]
    assert sorted(names) == sorted(set(names))


def test_others_repeat_no_setting_of_a_table_except_where_it_means_something_else():
    own = {
        find_name for table in list(TABLES.values())[:3] for row in table for find_name in row.names.split()
    }
    repeated = {
        name
        for row in others.TABLE
        for name in row.names.split()
        if name.replace("-", "_") in own or name in own
    }
    assert repeated == set()


@pytest.mark.parametrize("name", TABLES)
def test_every_row_has_a_flag_or_says_what_to_do(name):
    assert [row.names for row in TABLES[name] if not (row.flags or row.instead)] == []


@pytest.mark.parametrize("name", TABLES)
def test_flags_of_the_tables_exist(name, capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    known = set(re.findall(r"--([a-z][\w-]+)", capsys.readouterr().out))
    found = {flag for row in TABLES[name] for flag in re.findall(r"--([a-z][\w-]+)", row.flags)}
    passed_on = {"rollout-enable-chunked-prefill"}  # vLLM's, which --help does not list
    roles = {flag for flag in found if flag.split("-")[0] in ("actor", "critic", "reference")}
    assert {flag.removeprefix("no-") for flag in found} - known - passed_on - roles == set()


@pytest.mark.parametrize(
    "flags, expected",
    [
        (
            "--ppo_mini_batch_size 8",
            "verl counts prompts, megarl samples. Try --global-batch-size 64 instead.",
        ),
        ("--ppo_mini_batch_size 8 --num-samples-per-prompt 5", "Try --global-batch-size 40 instead."),
        ("--train_batch_size 8", "Try --global-batch-size 8 instead."),
        ("--data.train_batch_size 8", "Try --num-prompts 8 instead."),
        ("--rollout.n 5", "Try --num-samples-per-prompt 5 instead."),
        ("--actor_rollout_ref.rollout.n=5", "Try --num-samples-per-prompt 5 instead."),
        ("--use_kl_loss True", "Try --kl-mode loss instead."),
        ("--use_kl_loss", "Try --kl-mode loss instead."),
        ("--use_kl_in_reward True", "Try --kl-mode reward instead."),
        ("--kl_loss_type low_var_kl", "Try --kl-estimator k3 instead."),
        ("--kl_loss_coef 0.1", "Try --kl-coef 0.1 --kl-mode loss instead."),
        ("--loss_agg_mode seq-mean-token-sum-norm", "Try --loss-aggregation dr-grpo instead."),
        ("--loss_type dr_grpo", "Try --loss-aggregation dr-grpo instead."),
        ("--trainer.logger ['console','wandb']", "Try --log-with wandb instead."),
        ("--report_to all", "Try --log-with tensorboard wandb mlflow instead."),
        ("--model.path m", "Try --model m instead."),
        ("--trainer.nnodes 2", "torchrun --nnodes N --nproc-per-node 8 -m megarl.train @FILE. Leave it out."),
        ("--lr_warmup_steps_ratio 0.1 --train-iters 50", "Try --lr-warmup-iters 5 instead."),
        ("--adv_estimator rloo", "Try --algorithm rloo instead."),
        ("--importance_sampling_level sequence", "Try --policy-loss gspo instead."),
        ("--adv_estimator remax", "Try --algorithm grpo instead."),
        ("--max_trajectory_age_steps 2", "Try --staleness 2 instead."),
        ("--max_staleness 4", "Try --staleness 4 instead."),
        ("--async_queue_size 1", "Try --staleness 1 instead."),
        ("--async_train", "Try --staleness 1 instead."),
        ("--partial-rollout", "--staleness 1: unfinished responses go on over a weight sync"),
        ("--async_training.staleness_threshold 0.5", "--staleness counts whole training steps"),
        ("--async_training.partial_rollout True", "--weight-update recompute"),
        ("--in-flight-weight-updates", "--weight-update says what unfinished responses do"),
        ("--distributed-timeout-minutes 30", "Try --call-timeout-s 1800 instead."),
        ("--norm_adv_by_std_in_grpo False", "Try --no-normalize-advantages-by-std instead."),
        ("--per_device_train_batch_size 4", "num_processes x per_device_train_batch_size"),
    ],
)
def test_a_flag_of_another_framework_is_answered(capsys, flags, expected):
    assert cli.main(["check", "--algorithm", "grpo", *flags.split()]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "no such flag" in line]
    assert flags.split()[0].partition("=")[0] in line and expected in line


@pytest.mark.parametrize("name", ["rollout.n", "model.path", "trainer.logger", "use-kl-loss", "kl_loss_type"])
def test_a_short_name_is_found(name):
    assert find_row(name) is not None


def test_a_dotted_override_is_answered_once():
    reader = Reader()
    reader.read(["--algorithm", "grpo", "trainer.nnodes=1", "+data.seed=3", "--seed", "1"])
    [error] = reader.errors
    assert "trainer.nnodes=1 and 1 more" in error and "megarl translate -- trainer.nnodes=1 ..." in error
    assert [word.text for one in reader.occurrences for word in one.words] == ["grpo", "1"]
