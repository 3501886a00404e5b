"""Make the lines of an args file that several of TRL's settings decide together.

Each function is `lines` of rows of the table in trl.py."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from megarl.frameworks.rows import (
    Line,
    Settings,
    as_list,
    decaying,
    key_of,
    lora,
    model_folder,
    ranks_of_nodes,
    schedule,
    trackers,
    train_iters,
)

LOSSES = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "dr-grpo",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
}
"""loss_type -> --loss-aggregation."""
LOSS_FLAGS = {
    name: f"--loss-aggregation {ours}" + (f" --policy-loss {name}" if name in ("cispo", "sapo") else "")
    for name, ours in LOSSES.items()
}
"""loss_type -> all flags that it is here."""
BATCH = "num_processes x per_device_train_batch_size x gradient_accumulation_steps"


def model(settings: Settings) -> Iterator[Line]:
    yield Line("algorithm", "grpo")
    yield model_folder(settings["model_name_or_path"])
    dtype = {key_of(settings[name]) for name in ("torch_dtype", "dtype")}
    if settings.is_on("bf16") or "bfloat16" in dtype:
        yield Line("bf16")
    if settings.is_on("fp16"):
        yield Line("", note="fp16: float16 training is not supported; --bf16 is the nearest")


def _updates(settings: Settings) -> int | None:
    """Return the optimizer updates per generation, None if they are not whole."""
    per_generation = settings.number("steps_per_generation")
    accumulated = settings.number("gradient_accumulation_steps") or 1
    if batch := settings.number("generation_batch_size"):
        per_generation = batch / (
            (settings.number("per_device_train_batch_size") or 1) * _processes(settings)
        )
    updates = (per_generation or accumulated) / accumulated
    return int(updates) if updates == int(updates) and updates > 0 else None


def _processes(settings: Settings) -> int:
    return settings.ranks or int(settings.number("num_processes") or 1)


def batch(settings: Settings) -> Iterator[Line]:
    """Yield the flags of batch sizes. TRL counts samples per device and micro-batch, megarl prompts per step
    and samples per update."""
    parts = [settings.number(name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    group, updates = settings.number("num_generations"), _updates(settings)
    if None in parts or group is None or updates is None:
        yield Line("", note=f"--global-batch-size = {BATCH}")
        yield Line("", note="--num-prompts = samples of one generation / num_generations")
        return
    samples = parts[0] * parts[1] * _processes(settings)
    known = settings.ranks or settings.given.get("num_processes")
    unsure = "" if known else "; num_processes taken as 1: megarl translate --ranks N"
    if samples * updates % group:
        yield Line(
            "",
            note=f"{samples * updates} samples per generation: num_generations {group} does not divide them",
        )
    yield Line("num-samples-per-prompt", group)
    prompts = -(-samples * updates // group)
    yield Line("num-prompts", prompts, f"{samples * updates} samples of a generation / {group}{unsure}")
    yield Line("global-batch-size", prompts * group // updates, f"{BATCH}{unsure}")
    yield Line("num-epochs", settings["num_iterations"])
    yield from _ranks(settings, unsure[2:])


def _ranks(settings: Settings, unsure: str) -> Iterator[Line]:
    processes, machines = _processes(settings), int(settings.number("num_machines") or 1)
    if processes % machines:
        note = f"{processes} processes on {machines} machines: all nodes have the same number here"
        yield Line("", note=f"--nnodes N --nproc-per-node M: {note}")
        return
    if processes > 8 and "num_machines" not in settings.given:
        unsure = f"on one machine; on N machines --nnodes N --nproc-per-node {processes}/N"
    yield from ranks_of_nodes(machines, processes // machines, unsure)


def steps(settings: Settings) -> Iterator[Line]:
    """Yield --train-iters. TRL's max_steps counts optimizer updates, megarl's steps are generations."""
    per_step = (_updates(settings) or 1) * int(settings.number("num_iterations") or 1)
    steps = settings.number("max_steps")
    if steps is not None and steps > 0:
        yield Line("train-iters", -(-steps // per_step), f"{steps} updates / {per_step} per step")
        return
    epochs = settings.number("num_train_epochs") or 1
    yield train_iters(epochs, settings.rows, settings.ours.get("num-prompts"), "num_train_epochs")


def rate(settings: Settings) -> Iterator[Line]:
    per_step = (_updates(settings) or 1) * int(settings.number("num_iterations") or 1)
    warmup, ratio = settings.number("warmup_steps"), settings.number("warmup_ratio")
    total = settings.ours.get("train-iters")
    if warmup and warmup < 1:  # a share of the steps
        warmup, ratio = None, warmup
    if warmup:
        warmup, ratio = -(-warmup // per_step), None
    elif ratio and isinstance(total, int):
        warmup = math.ceil(ratio * total)  # as Hugging Face's trainer rounds
    kwargs = _scheduler_kwargs(settings)
    style = settings["lr_scheduler_type"]
    min_ratio = kwargs.pop("min_lr_rate", None)
    flags = [*schedule("", settings["learning_rate"], style, int(warmup or 0), min_ratio)]
    if (lowest := kwargs.pop("min_lr", None)) is not None:
        flags.append(Line("min-lr", lowest))
    yield from decaying("", flags)
    for name, value in kwargs.items():
        yield Line("", note=f"lr_scheduler_kwargs: {name}={value} has no counterpart")
    if ratio and not isinstance(total, int):
        yield Line("", note=f"--lr-warmup-iters = {ratio} x --train-iters")


def _scheduler_kwargs(settings: Settings) -> dict[str, object]:
    """Return lr_scheduler_kwargs, which is JSON text on a command line."""
    value = settings["lr_scheduler_kwargs"]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {"text": value}
    return dict(value) if isinstance(value, dict) else {}


def loss(settings: Settings) -> Iterator[Line]:
    name = key_of(settings["loss_type"])
    note = "" if name in LOSSES else f"the nearest to {name}; docs/algorithms.md says how to add a loss"
    if name == "bnpo":
        note = "bnpo takes the mean over the tokens of a device's batch, megarl over the whole update"
    yield Line("loss-aggregation", LOSSES.get(name, "token-mean"), note)
    is_sequence = key_of(settings["importance_sampling_level"]) == "sequence"
    if name in ("cispo", "sapo") and is_sequence:
        yield Line(
            "", note=f"importance_sampling_level=sequence: {name} weighs each token by its own ratio here"
        )
    loss = name if name in ("cispo", "sapo") else "gspo" if is_sequence else "ppo"
    yield Line("policy-loss", loss)
    if loss == "sapo":
        yield Line("sapo-tau-pos", settings["sapo_temperature_pos"])
        yield Line("sapo-tau-neg", settings["sapo_temperature_neg"])
    else:
        yield from _cispo_clip(settings) if loss == "cispo" else _clip(settings)
    if loss == "ppo" and settings["delta"] is not None:
        yield Line("clip-ratio-c", settings["delta"])
    if settings.is_on("mask_truncated_completions"):
        yield Line("overlong-filter")


def _clip(settings: Settings) -> Iterator[Line]:
    low, high = settings["epsilon"], settings["epsilon_high"]
    yield Line("clip-eps-low", low)
    yield Line("clip-eps-high", low if high is None else high)


def _cispo_clip(settings: Settings) -> Iterator[Line]:
    """Yield the clip of cispo. TRL bounds the ratio by epsilon_high from above only, megarl by 1 - low and
    1 + high."""
    name = "epsilon" if settings["epsilon_high"] is None else "epsilon_high"
    bound = settings.number(name)
    yield Line("clip-eps-low", 1, "cispo has no lower bound in TRL")
    if bound is None:
        yield Line("", note=f"--clip-eps-high = {name} - 1")
    elif bound < 1:
        note = f"ratios are at most {bound} in TRL, at least 1 here: set epsilon_high to a number above 1"
        yield Line("clip-eps-high", 0, note)
    else:
        yield Line("clip-eps-high", float(f"{bound - 1:.9g}"), f"TRL bounds the ratio itself, by {bound}")


def kl(settings: Settings) -> Iterator[Line]:
    beta = settings.number("beta")
    yield Line("kl-mode", "loss" if beta else "none")
    if beta:
        yield Line("kl-coef", beta)
        yield Line("kl-estimator", "k3")


def scale(settings: Settings) -> Iterator[Line]:
    value = key_of(settings["scale_rewards"])
    yield Line("normalize-advantages-by-std", value not in ("false", "none"))
    if value in ("batch", "mean"):
        yield Line("", note=f"scale_rewards={value}: the standard deviation is the group's here")


def data(settings: Settings) -> Iterator[Line]:
    name = settings["dataset_name"] or settings["train_dataset"]
    if name is None:
        yield Line("", note="--train-data FILE ...: neither dataset_name nor train_dataset is a known value")
        return
    note = (
        ""
        if str(name).endswith((".jsonl", ".parquet"))
        else "files: docs/data_and_rewards.md has the columns"
    )
    yield Line("train-data", [name], note)


def rewards(settings: Settings) -> Iterator[Line]:
    names = as_list(settings["reward_funcs"])
    if names:
        yield Line(
            "",
            note=f"reward_funcs ({', '.join(names)}): write one function that returns their sum, or their "
            "scores for --score-weights: --reward-function rewards.py:score; for mathematics --reward math",
        )
    else:
        yield Line(
            "",
            note="the reward functions given to GRPOTrainer: write one, --reward-function rewards.py:score",
        )


def intervals(settings: Settings) -> Iterator[Line]:
    per_step = (_updates(settings) or 1) * int(settings.number("num_iterations") or 1)
    for flag, strategy, name in (
        ("save-interval", "save_strategy", "save_steps"),
        ("eval-interval", "eval_strategy", "eval_steps"),
    ):
        how, steps = key_of(settings[strategy]), settings.number(name)
        if steps is None and how == "steps":  # as in Hugging Face's trainer
            steps = settings.number("logging_steps")
        total = settings.ours.get("train-iters")
        if how == "best":
            yield Line(
                "", note=f"{strategy}=best: --{flag} N; --best-metric eval/reward keeps the best checkpoint"
            )
        elif how == "epoch":
            yield Line("", note=f"{strategy}=epoch: --{flag} = rows // --num-prompts")
        elif how != "no" and steps and steps < 1 and isinstance(total, int):
            yield Line(flag, max(1, int(steps * total)))
        elif how != "no" and steps and steps >= 1:
            yield Line(flag, int(-(-steps // per_step)))


def vllm(settings: Settings) -> Iterator[Line]:
    if not settings.is_on("use_vllm"):
        if "use_vllm" in settings.given:
            yield Line(
                "", note="use_vllm=false: vLLM samples all the same; --rollout-backend transformers does not"
            )
        return
    yield Line("rollout-gpu-memory-utilization", settings["vllm_gpu_memory_utilization"])
    yield Line("rollout-tensor-parallel-size", settings["vllm_tensor_parallel_size"])
    if key_of(settings["vllm_mode"]) == "server":
        yield Line("", note="vllm_mode=server: --rollout-ranks gives the engines devices of their own")
    if settings.is_on("vllm_importance_sampling_correction"):
        yield from _correction(settings)


def _correction(settings: Settings) -> Iterator[Line]:
    """Yield the weights for the difference of trainer and engine. TRL weighs by the ratio of their
    probabilities, and either truncates the ratio or makes it 0 outside of the bounds."""
    mode = key_of(settings["vllm_importance_sampling_mode"])
    level, _, how = mode.partition("_")
    low, high = settings["vllm_importance_sampling_clip_min"], settings["vllm_importance_sampling_cap"]
    high = settings["vllm_importance_sampling_clip_max"] if high is None else high
    if level not in ("token", "sequence") or how not in ("mask", "truncate"):
        yield Line("", note=f"vllm_importance_sampling_mode={mode}: see --mis-level and --tis-clip")
        return
    unbounded = "TRL has no upper bound" if high is None else ""
    high = 1e30 if high is None else high
    yield Line("tis-clip", high, unbounded)
    yield Line("tis-level", level)
    if how == "mask":
        yield Line("mis-level", level)
        yield Line("mis-high", high, unbounded)
        yield Line("mis-low", 1e-30 if low is None else low, "TRL has no lower bound" if low is None else "")
    elif low is not None:
        yield Line("", note=f"vllm_importance_sampling_clip_min={low}: truncation has no lower bound here")


def adapters(settings: Settings) -> Iterator[Line]:
    rank = settings["lora_r"] if settings.is_on("use_peft") else None
    yield from lora("", rank, settings["lora_alpha"], settings["lora_target_modules"])


def loggers(settings: Settings) -> Iterator[Line]:
    yield from trackers(settings["report_to"])
