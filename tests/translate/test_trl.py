"""What TRL's settings mean, in YAML, JSON and commands."""

import json
import os
from types import SimpleNamespace

import pytest

from tests.translate.conftest import of_file

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
        ("loss_type: cispo\nepsilon_high: 5.0",
         {"--policy-loss": ["cispo"], "--clip-eps-low": ["1"], "--clip-eps-high": ["4.0"]}),
        ("loss_type: cispo", {"--clip-eps-low": ["1"], "--clip-eps-high": ["0"]}),
        ("loss_type: sapo\nsapo_temperature_neg: 1.1\ndelta: 3",
         {"--policy-loss": ["sapo"], "--loss-aggregation": ["seq-mean-token-mean"], "--sapo-tau-pos": ["1.0"],
          "--sapo-tau-neg": ["1.1"], "--clip-eps-low": None, "--clip-ratio-c": None}),
        ("scale_rewards: false", {"--no-normalize-advantages-by-std": []}),
        ("delta: 4.0", {"--clip-ratio-c": ["4.0"]}),
        ("learning_rate: 2e-6", {"--lr": ["2e-6"]}),
        ("use_vllm: true", {"--tis-clip": ["3.0"], "--tis-level": ["sequence"], "--mis-level": ["sequence"],
                            "--mis-high": ["3.0"], "--rollout-gpu-memory-utilization": ["0.3"]}),
        ("use_vllm: true\nvllm_importance_sampling_mode: token_mask\nvllm_importance_sampling_clip_max: 2.5\n"
         "vllm_importance_sampling_clip_min: 0.5",
         {"--mis-level": ["token"], "--mis-low": ["0.5"], "--mis-high": ["2.5"], "--tis-clip": ["2.5"]}),
        ("use_vllm: true\nvllm_importance_sampling_mode: token_truncate\nvllm_importance_sampling_cap: 2.0",
         {"--tis-clip": ["2.0"], "--tis-level": ["token"], "--mis-level": None}),
        ("use_vllm: true\nvllm_importance_sampling_mode: sequence_truncate",
         {"--tis-clip": ["3.0"], "--tis-level": ["sequence"], "--mis-level": None}),
        ("vllm_importance_sampling_clip_max: 2.0", {"--tis-clip": None}),
        # null is no bound in TRL, as opposed to its default 3.0
        ("use_vllm: true\nvllm_importance_sampling_clip_max: null\nvllm_importance_sampling_clip_min: 0.5",
         {"--mis-low": ["0.5"], "--mis-high": ["1e+30"], "--tis-clip": ["1e+30"]}),
        ("use_vllm: true\nvllm_importance_sampling_clip_max: null\n"
         "vllm_importance_sampling_mode: token_truncate",
         {"--tis-clip": ["1e+30"], "--tis-level": ["token"], "--mis-level": None}),
        ("entropy_coef: 0.01", {"--entropy-coef": ["0.01"]}),
        ("warmup_ratio: 0.03\nmax_steps: 50", {"--lr-warmup-iters": ["2"]}),  # transformers rounds up
        ("per_device_train_batch_size: 2.0\nnum_generations: 4.0",
         {"--num-prompts": ["8"], "--num-samples-per-prompt": ["4"], "--train-iters": ["36"]}),
        ("save_steps: 2e1\nnum_iterations: 2.0", {"--save-interval": ["10"], "--num-epochs": ["2"]}),
        ("report_to: [wandb, trackio]", {"--log-with": ["wandb"]}),
        ("use_peft: true\nlora_target_modules: [q_proj, v_proj]", {"--lora-target-modules": ["linear_qkv"]}),
        ("num_train_epochs: 2", {"--train-iters": ["24"]}),
        ("lr_scheduler_kwargs: {min_lr: 1e-7}", {"--min-lr": ["1e-7"]}),
        ("lr_scheduler_kwargs: '{\"min_lr_rate\": 0.1}'", {"--min-lr": ["1e-07"]}),
        ("eval_strategy: steps\nlogging_steps: 20", {"--eval-interval": ["20"]}),
        ("eval_strategy: steps", {"--eval-interval": ["10"]}),
        ("save_strategy: best", {"--save-interval": None}),
        ("warmup_steps: 0.1\nmax_steps: 50", {"--lr-warmup-iters": ["5"]}),
        ("dataset_name: ~/d.jsonl", {"--train-data": [os.path.expanduser("~/d.jsonl")]}),
        ("output_dir: out", {"--save": ["out"], "--train-data": None}),
        ("", {"--max-response-length": ["512"], "--save": ["trainer_output"]}),
    ],
)  # fmt: skip
def test_trl(translate, tmp_path, more, expected):
    flags, _ = of_file(translate, tmp_path, "grpo.yaml", TRL + more, "--ranks", 2, "--rows", 100)
    assert {flag: flags.get(flag) for flag in expected} == expected


def test_what_trl_leaves_open_is_a_comment(translate, tmp_path):
    more = "warmup_steps: 0.1\nlr_scheduler_kwargs: {num_cycles: 2}\nuse_vllm: true\nvllm_mode: server"
    flags, comments = of_file(translate, tmp_path, "grpo.yaml", TRL + more)
    assert "--lr-warmup-iters" not in flags and "--train-data" not in flags
    assert "--lr-warmup-iters = 0.1 x --train-iters" in comments
    assert "lr_scheduler_kwargs: num_cycles=2 has no counterpart" in comments
    assert "vllm_mode=server: --rollout-ranks" in comments
    assert "--train-data FILE ...: neither dataset_name nor train_dataset" in comments


def test_warm_up_steps_are_those_of_transformers(translate, tmp_path):
    from transformers import TrainingArguments

    for share in (0.03, 0.1, 0.07, 0.5):
        theirs = TrainingArguments.get_warmup_steps(SimpleNamespace(warmup_steps=share), 50)
        flags, _ = of_file(translate, tmp_path, "grpo.yaml", TRL + f"warmup_steps: {share}\nmax_steps: 50")
        assert flags["--lr-warmup-iters"] == [str(theirs)]


def test_what_trl_has_of_its_own_is_named(translate, tmp_path):
    more = "sync_ref_model: true\nuse_adaptive_entropy: true\nmax_completion_length: null"
    _, comments = of_file(translate, tmp_path, "grpo.yaml", TRL + more)
    assert "--reference-update-interval N makes the reference a copy of the actor" in comments
    assert "--entropy-coef stays the same:\nuse_adaptive_entropy=True" in comments
    assert "no such value here; megarl's default counts:\nmax_completion_length=None" in comments


@pytest.mark.parametrize("value, is_noted", [("batch", True), ("group", False), ("false", False)])
def test_trls_scale_over_the_batch_is_noted(translate, tmp_path, value, is_noted):
    _, comments = of_file(
        translate, tmp_path, "grpo.yaml", TRL + f"scale_rewards: {value}", "--ranks", 2, "--rows", 100
    )
    assert ("the standard deviation is the group's here" in comments) is is_noted


def test_trl_in_json_and_a_command_line_agree(translate, tmp_path):
    settings = {"num_generations": 4, "beta": 0.1, "per_device_train_batch_size": 4, "output_dir": "out"}
    shell = "accelerate launch train.py --num_generations 4 --beta=0.1 \\\n  --per_device_train_batch_size 4 "
    shell += '--output_dir "out"\n'
    results = [
        of_file(translate, tmp_path, "grpo.json", json.dumps(settings)),
        of_file(translate, tmp_path, "grpo.sh", shell),
    ]
    assert results[0] == results[1]
    assert results[0][0]["--kl-coef"] == ["0.1"]
