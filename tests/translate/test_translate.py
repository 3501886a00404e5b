"""What settings of other frameworks mean, how their files are read, and how `megarl translate` fails."""

import re
from pathlib import Path

import pytest

from megarl import cli
from megarl.config.args_file import Reader
from megarl.frameworks import others, slime, trl, verl
from megarl.frameworks.answers import find_row
from tests.translate.conftest import of_file


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
        # clip_ratio_low and clip_ratio_high are 0.2 in verl unless they are set, to null too
        ([f"{ACTOR}.clip_ratio=0.1"], {"--clip-eps-low": ["0.2"], "--clip-eps-high": ["0.2"]}),
        (
            [f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_low=null", f"{ACTOR}.clip_ratio_high=0.3"],
            {"--clip-eps-low": ["0.1"], "--clip-eps-high": ["0.3"]},
        ),
        ([f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"], {"--loss-aggregation": ["dr-grpo"]}),
        (
            ["algorithm.adv_estimator=gae"],
            {"--algorithm": ["ppo"], "--gae-lambda": ["1.0"], "--critic-lr": ["1e-05"]},
        ),
        (["algorithm.adv_estimator=rloo"], {"--algorithm": ["rloo"], "--clip-eps-low": ["0.2"]}),
        (
            [f"{ACTOR}.policy_loss.loss_mode=dppo_tv", f"{ACTOR}.clip_ratio_high=0.15"],
            {"--policy-loss": ["dppo-tv"], "--dppo-threshold": ["0.15"], "--clip-eps-low": None},
        ),
        (
            [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.clip_ratio_low=3e-4"],
            {"--policy-loss": ["gspo"], "--clip-eps-low": ["3e-4"], "--clip-ratio-c": None},
        ),
        (
            [f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.tau_neg=1.1"],
            {"--policy-loss": ["sapo"], "--clip-eps-low": None, "--sapo-tau-neg": ["1.1"]},
        ),
        *(
            (
                [f"{ACTOR}.policy_loss.loss_mode={loss}", f"{ACTOR}.loss_agg_mode=token-mean"],
                {"--loss-aggregation": ["seq-mean-token-mean"]},
            )
            for loss in ("gspo", "sapo", "geo_mean")
        ),
        ([f"{ACTOR}.use_token_level_loss=False"], {"--loss-aggregation": ["seq-mean-token-mean"]}),
        (
            [f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.policy_loss.clip_cov_ub=4.0"],
            {
                "--policy-loss": ["clip-cov"],
                "--cov-share": ["0.0002"],
                "--cov-low": ["1.0"],
                "--cov-high": ["4.0"],
                "--clip-eps-low": ["0.2"],
            },
        ),
        (
            [f"{ACTOR}.policy_loss.loss_mode=kl_cov", f"{ACTOR}.policy_loss.kl_cov_ratio=1e-3"],
            {"--policy-loss": ["kl-cov"], "--cov-share": ["1e-3"], "--cov-kl-coef": ["0.1"]},
        ),
        (["algorithm.adv_estimator=remax"], {"--algorithm": ["remax"]}),
        (["algorithm.norm_adv_by_std_in_grpo=False"], {"--no-normalize-advantages-by-std": []}),
        (
            [f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1", "trainer.total_training_steps=50"],
            {"--lr-warmup-iters": ["5"], "--train-iters": ["50"]},
        ),
        ([f"{ACTOR}.optim.lr=2e-6", f"{ACTOR}.optim.min_lr_ratio=0.1"], {"--min-lr": None}),
        (
            [f"{ACTOR}.optim.{one}" for one in ("lr=2e-6", "min_lr_ratio=0.1", "lr_scheduler_type=cosine")],
            {"--min-lr": ["2e-07"]},
        ),
        ([f"{ACTOR}.optim.lr_warmup_steps=10"], {"--lr-warmup-iters": ["10"]}),
        (
            [f"{ACTOR}.ppo_max_token_len_per_gpu=1000", f"{ACTOR}.ulysses_sequence_parallel_size=4"],
            {"--context-parallel-size": ["4"], "--max-tokens-per-micro-batch": ["4000"]},
        ),
        (["trainer.nnodes=2", "trainer.n_gpus_per_node=4"], {"--nproc-per-node": ["4"], "--nnodes": ["2"]}),
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


@pytest.mark.parametrize("prompts", ["1e3", "1000.0", "1000"])
def test_whole_numbers_may_be_written_as_others(translate, prompts):
    flags, _ = of_verl(translate, f"data.train_batch_size={prompts}", "trainer.total_epochs=3", rows=10000)
    assert flags["--num-prompts"] == ["1000"] and flags["--train-iters"] == ["30"]


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
    flags, comments = of_verl(translate, *words, rows=10000)
    written = {flag.removeprefix("--").removeprefix("no-") for flag in flags}
    for name in (word.partition("=")[0] for word in words):
        row = next((row for row in verl.TABLE if row.has(name)), None)
        used = row is not None and (bool(row.flags_here() & written) or (row.lines and not row.flags))
        defaults = row is not None and row.flags == "{}" and row.lines is None
        assert used or defaults or f"{name}=" in comments, name


SLIME = """
+ ray job submit --address=http://127.0.0.1 -- python3 train.py --actor-num-gpus-per-node 4 \\
   --rollout-batch-size 32 \\
   --n-samples-per-prompt 8 --num-rollout 3000 --global-batch-size 128 --lr-warmup-iters 10 \\
   #--over-sampling-batch-size 64
   --hf-checkpoint /m --context-parallel-size 2 --max-tokens-per-gpu 9216 %s
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
        ("--gamma 1.0", {"--gamma": None}),
        ("--advantage-estimator ppo --gamma 0.9", {"--gamma": ["0.9"]}),
        ("--eval-prompt-data aime /d/aime.jsonl", {"--eval-data": ["/d/aime.jsonl"]}),
        ("--sequence-parallel", {"--sequence-parallel": []}),
        # slime keeps Megatron's default, a linear decay to --min-lr 0
        ("", {"--lr-decay-style": ["linear"], "--min-lr": None}),
        ("--lr-decay-style constant --min-lr 1e-7", {"--lr-decay-style": ["constant"], "--min-lr": None}),
        ("--lr-decay-style cosine --min-lr 1e-7", {"--lr-decay-style": ["cosine"], "--min-lr": ["1e-7"]}),
    ],
)  # fmt: skip
def test_slime(translate, tmp_path, more, expected):
    flags, comments = of_file(translate, tmp_path, "run.sh", SLIME % more)
    assert {flag: flags.get(flag) for flag in expected} == expected
    assert "over-sampling" not in comments


def test_a_batch_of_slime_that_is_not_given_is_a_comment(translate, tmp_path):
    text = "python3 train.py --hf-checkpoint /m --n-samples-per-prompt 8"
    flags, comments = of_file(translate, tmp_path, "run.sh", text)
    assert not any("none" in words for words in flags.values())
    for line in ("--num-prompts N: --rollout-batch-size", "--train-iters N: --num-rollout"):
        assert f"{line} is not given" in comments


def test_a_damaged_data_file_is_not_counted(translate, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    flags, comments = of_verl(translate, f"data.train_files={tmp_path}/a.parquet")
    assert flags["--train-data"] == [f"{tmp_path}/a.parquet"] and "megarl translate --rows N" in comments
    assert "the rows of --train-data cannot be counted" in comments


def test_paths_in_lists(translate, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    assert of_verl(translate, "data.train_files=~/a.parquet")[0]["--train-data"] == ["/h/a.parquet"]
    text = "algorithm: {adv_estimator: grpo}\n"
    text += 'data: {dir: /d, train_files: ["${data.dir}/a", ~/b], val_files: ["${data.none}/c"]}'
    flags, comments = of_file(translate, tmp_path, "ppo.yaml", text)
    assert flags["--train-data"] == ["/d/a", "/h/b"] and "--eval-data" not in flags
    assert "data.val_files: ['${data.none}/c'] cannot be resolved; set --eval-data" in comments


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
    "argv, expected",
    [
        (["--", "data.seed"], "-- (data.seed): has no settings of verl, TRL or slime"),
        (["--", "data.seed=1", "tee"], "-- (data.seed=1): has tee among verl's settings. Each must be key="),
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
        (
            "--trainer.nnodes 2",
            "by torchrun, or with --executor ray (docs/clusters.md). Try --nnodes 2 instead.",
        ),
        ("--lr_warmup_steps_ratio 0.1 --train-iters 50", "Try --lr-warmup-iters 5 instead."),
        # 1.5 and 0.3 steps
        ("--lr-warmup-fraction 0.05 --train-iters 30", "Try --lr-warmup-iters 2 instead."),
        ("--warmup_ratio 0.1 --train-iters 3", "Try --lr-warmup-iters 1 instead."),
        ("--min_lr_ratio 0.1 --lr 1e-5", "Try --min-lr 1e-06 instead."),
        ("--adv_estimator rloo", "Try --algorithm rloo instead."),
        ("--importance_sampling_level sequence", "Try --policy-loss gspo instead."),
        ("--adv_estimator remax", "Try --algorithm remax instead."),
        ("--adv_estimator unheard_of", "Try --algorithm grpo instead."),
        ("--kl_cov_ratio 2e-4", "Try --cov-share 2e-4 instead."),
        ("--max_epochs 2", "--train-iters says how often the data is seen. Try --num-epochs 2 instead."),
        (
            "--remote-rm-url http://h/score",
            "write a function that asks the server: --reward-function FILE.py:NAME",
        ),
        ("--max_trajectory_age_steps 2", "Try --staleness 2 instead."),
        ("--max_staleness 4", "Try --staleness 4 instead."),
        ("--grpo.async_grpo.enabled true", "Try --staleness 1 instead."),
        ("--use_vllm True", "vLLM samples unless --rollout-backend transformers is given. Leave it out."),
        ("--rollout.name hf", "Try --rollout-backend transformers instead."),
        ("--rollout.name sglang", "no counterpart among those of --rollout-backend"),
        ("--use-rollout-logprobs", "Try --old-log-probs engine instead."),
        ("--ref-load /r", "--reference-model names a Hugging Face folder"),
        ("--ray_init.num_cpus 4", "--executor ray starts the ranks in a Ray cluster"),
        ("--async_queue_size 1", "Try --staleness 1 instead."),
        ("--async_train", "Try --staleness 1 instead."),
        ("--partial-rollout", "--staleness 1: unfinished responses go on over a weight sync"),
        ("--async_training.staleness_threshold 0.5", "--staleness counts whole training steps"),
        ("--async_training.partial_rollout True", "--weight-update recompute"),
        ("--in-flight-weight-updates", "--weight-update says what unfinished responses do"),
        ("--distributed-timeout-minutes 30", "Try --call-timeout-s 1800 instead."),
        ("--norm_adv_by_std_in_grpo False", "Try --no-normalize-advantages-by-std instead."),
        ("--use_kl_loss False", "Try --kl-mode none instead."),
        ("--use_tis False", "--use_tis (False): no such flag. Leave it out."),
        ("--optimizer_cpu_offload False", "Try --no-optimizer-cpu-offload instead."),
        ("--override_optimizer_config.optimizer_cpu_offload 0", "Try --no-optimizer-cpu-offload instead."),
        ("--free_cache_engine True", "Try --rollout-release-kv-cache instead."),
        ("--custom_reward_function.path a.py", "Try --reward-function a.py:compute_score instead."),
        ("--advantage_estimator reinforce_plus_plus", "Try --algorithm reinforce++ instead."),
        ("--advantage_estimator gspo", "Try --algorithm grpo --policy-loss gspo instead."),
        ("--lora_target_modules q_proj v_proj down_proj", "Try --lora-target-modules linear_qkv linear_fc2"),
        ("--lora_target_modules mlp", "no counterpart among those of --lora-target-modules. Leave it out."),
        ("--kl_loss_type low_var_kl+", "Try --kl-estimator k3 --kl-straight-through instead."),
        ("--kl_loss_type full", "its value has no counterpart among those of --kl-estimator"),
        ("--loss_type sapo", "Try --loss-aggregation seq-mean-token-mean --policy-loss sapo instead."),
        ("--gradient_checkpointing False", "(False): no such flag. Leave it out."),
        ("--lr_scheduler_type step", "Here it is --lr-decay-style: must be one of constant, linear, cosine."),
        ("--save_steps often", "Here it is --save-interval: must be a whole number."),
        ("--save_steps", "Here it is --save-interval: needs a value."),
        ("--lr_warmup_steps_ratio 0.1", "Set --lr-warmup-iters to 0.1 x --train-iters."),
        ("--tis_imp_ratio_cap -1", "there is no correction without --tis-clip. Leave it out."),
        ("--nccl_timeout 600", "a timeout of single collectives; --call-timeout-s is of whole calls"),
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
