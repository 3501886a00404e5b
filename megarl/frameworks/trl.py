"""Map the settings of TRL's GRPOConfig and GRPOTrainer to megarl's flags.

Arguments of the trainer, of its adapters (LoraConfig) and of `accelerate launch` are in the same table."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.frameworks.rows import (
    RECOMPUTE,
    STYLES,
    Line,
    Row,
    Settings,
    as_list,
    key_of,
    known_trackers,
    lora,
    model_folder,
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
}
"""loss_type -> --loss-aggregation."""
_BATCH = "num_processes x per_device_train_batch_size x gradient_accumulation_steps"


def _model(settings: Settings) -> Iterator[Line]:
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


def _batch(settings: Settings) -> Iterator[Line]:
    """Yield the flags of batch sizes. TRL counts samples per device and micro-batch, megarl prompts per step
    and samples per update."""
    parts = [settings.number(name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    group, updates = settings.number("num_generations"), _updates(settings)
    if None in parts or group is None or updates is None:
        yield Line("", note=f"--global-batch-size = {_BATCH}")
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
    yield Line("global-batch-size", prompts * group // updates, f"{_BATCH}{unsure}")
    yield Line("num-epochs", settings["num_iterations"])
    yield Line("nproc-per-node", _processes(settings), unsure[2:])


def _steps(settings: Settings) -> Iterator[Line]:
    """Yield --train-iters. TRL's max_steps counts optimizer updates, megarl's steps are generations."""
    per_step = (_updates(settings) or 1) * int(settings.number("num_iterations") or 1)
    steps = settings.number("max_steps")
    if steps is not None and steps > 0:
        yield Line("train-iters", -(-steps // per_step), f"{steps} updates / {per_step} per step")
        return
    epochs = settings.number("num_train_epochs") or 1
    yield train_iters(epochs, settings.rows, settings.ours.get("num-prompts"), "num_train_epochs")


def _rate(settings: Settings) -> Iterator[Line]:
    per_step = (_updates(settings) or 1) * int(settings.number("num_iterations") or 1)
    warmup, ratio = settings.number("warmup_steps"), settings.number("warmup_ratio")
    total = settings.ours.get("train-iters")
    if warmup:
        warmup = int(warmup * total) if 0 < warmup < 1 and isinstance(total, int) else -(-warmup // per_step)
    elif ratio and isinstance(total, int):
        warmup = int(ratio * total)
    kwargs = settings["lr_scheduler_kwargs"]
    min_ratio = kwargs.get("min_lr_rate") if isinstance(kwargs, dict) else None
    style = settings["lr_scheduler_type"]
    yield from schedule("", settings["learning_rate"], style, int(warmup or 0), min_ratio)
    if ratio and not isinstance(total, int):
        yield Line("", note=f"--lr-warmup-iters = {ratio} x --train-iters")


def _loss(settings: Settings) -> Iterator[Line]:
    name = key_of(settings["loss_type"])
    note = "" if name in LOSSES else f"the nearest to {name}; docs/algorithms.md says how to add a loss"
    if name == "bnpo":
        note = "bnpo takes the mean over the tokens of a device's batch, megarl over the whole update"
    yield Line("loss-aggregation", LOSSES.get(name, "token-mean"), note)
    is_sequence = key_of(settings["importance_sampling_level"]) == "sequence"
    if name == "cispo" or is_sequence:
        yield Line("policy-loss", "gspo" if is_sequence else "cispo")
    low, high = settings["epsilon"], settings["epsilon_high"]
    yield Line("clip-eps-low", low)
    yield Line("clip-eps-high", low if high is None else high)
    if settings.is_on("mask_truncated_completions"):
        yield Line("overlong-filter")


def _kl(settings: Settings) -> Iterator[Line]:
    beta = settings.number("beta")
    yield Line("kl-mode", "loss" if beta else "none")
    if beta:
        yield Line("kl-coef", beta)
        yield Line("kl-estimator", "k3")


def _scale(settings: Settings) -> Iterator[Line]:
    value = key_of(settings["scale_rewards"])
    yield Line("normalize-advantages-by-std", value not in ("false", "none"))
    if value in ("batch", "mean"):
        yield Line("", note=f"scale_rewards={value}: the standard deviation is the group's here")


def _data(settings: Settings) -> Iterator[Line]:
    name = settings["dataset_name"] or settings["train_dataset"] or "train.jsonl"
    note = (
        ""
        if str(name).endswith((".jsonl", ".parquet"))
        else "files: docs/data_and_rewards.md has the columns"
    )
    yield Line("train-data", [name], note)


def _rewards(settings: Settings) -> Iterator[Line]:
    names = as_list(settings["reward_funcs"])
    if names:
        yield Line(
            "",
            note=f"reward_funcs ({', '.join(names)}): write their weighted sum as one function, "
            "--reward-function rewards.py:score; for rules of mathematics --reward math",
        )
    else:
        yield Line(
            "",
            note="the reward functions given to GRPOTrainer: write one, --reward-function rewards.py:score",
        )


def _intervals(settings: Settings) -> Iterator[Line]:
    per_step = (_updates(settings) or 1) * int(settings.number("num_iterations") or 1)
    for flag, strategy, name in (
        ("save-interval", "save_strategy", "save_steps"),
        ("eval-interval", "eval_strategy", "eval_steps"),
    ):
        how, steps = key_of(settings[strategy]), settings.number(name)
        total = settings.ours.get("train-iters")
        if how == "epoch":
            yield Line("", note=f"{strategy}=epoch: --{flag} = rows // --num-prompts")
        elif how != "no" and steps and steps < 1 and isinstance(total, int):
            yield Line(flag, max(1, int(steps * total)))
        elif how != "no" and steps and steps >= 1:
            yield Line(flag, int(-(-steps // per_step)))


def _vllm(settings: Settings) -> Iterator[Line]:
    if not settings.is_on("use_vllm"):
        return
    yield Line("rollout-gpu-memory-utilization", settings["vllm_gpu_memory_utilization"])
    yield Line("rollout-tensor-parallel-size", settings["vllm_tensor_parallel_size"])
    if key_of(settings["vllm_mode"]) == "server":
        yield Line("", note="vllm_mode=server: --rollout-ranks gives the engines devices of their own")
    if settings.is_on("vllm_importance_sampling_correction"):
        note = "per token; TRL's vllm_importance_sampling_mode may weigh whole sequences"
        yield Line("tis-clip", settings["vllm_importance_sampling_cap"], note)


def _lora(settings: Settings) -> Iterator[Line]:
    rank = settings["lora_r"] if settings.is_on("use_peft") else None
    yield from lora(rank, settings["lora_alpha"], settings["lora_target_modules"])


def _loggers(settings: Settings) -> Iterator[Line]:
    yield from trackers(settings["report_to"])


TABLE = (
    Row("model_name_or_path", "--model {}", lines=_model),
    Row("bf16", "{}", {"true": "--bf16", "false": "--no-bf16"}, default=True, lines=_model),
    Row("torch_dtype dtype", "{}", {"bfloat16": "--bf16", "float32": "--no-bf16"}, lines=_model),
    Row(
        "fp16", instead="float16 training is not supported. Use --bf16, or fp32", default=False, lines=_model
    ),
    Row("train_dataset dataset_name", "--train-data {}", lines=_data),
    Row("seed", "--seed {}", default=42),
    Row("shuffle_dataset", "{}", {"true": "--shuffle", "false": "--no-shuffle"}, default=True),
    Row(
        "max_prompt_length", "--max-prompt-length {}", note="TRL cuts longer prompts; here they are an error"
    ),
    Row("max_completion_length", "--max-response-length {}", default=256),
    Row(
        "per_device_train_batch_size",
        instead=f"--global-batch-size = {_BATCH}",
        default=8,
        lines=_batch,
    ),
    Row("gradient_accumulation_steps", instead=f"--global-batch-size = {_BATCH}", default=1, lines=_batch),
    Row("num_generations", "--num-samples-per-prompt {}", default=8, lines=_batch),
    Row(
        "generation_batch_size steps_per_generation",
        instead="--num-prompts = samples of one generation / num_generations",
        lines=_batch,
    ),
    Row("num_processes", "--nproc-per-node {}", lines=_batch),
    Row("num_iterations", "--num-epochs {}", default=1, lines=_batch),
    Row("max_steps", "--train-iters {}", note="updates there, generations here", default=-1, lines=_steps),
    Row(
        "num_train_epochs",
        instead="--train-iters = epochs x (rows // --num-prompts)",
        default=3,
        lines=_steps,
    ),
    Row("learning_rate", "--lr {}", default=1e-6, lines=_rate),
    Row("lr_scheduler_type", "--lr-decay-style {}", STYLES, default="linear", lines=_rate),
    Row("lr_scheduler_kwargs", instead="--min-lr is the rate at the end", lines=_rate),
    Row("warmup_steps", "--lr-warmup-iters {}", default=0, lines=_rate),
    Row("warmup_ratio", "--lr-warmup-iters {}", times="train-iters", default=0, lines=_rate),
    Row("weight_decay", "--weight-decay {}", default=0.0),
    Row("adam_beta1", "--adam-beta1 {}", default=0.9),
    Row("adam_beta2", "--adam-beta2 {}", default=0.999),
    Row("adam_epsilon", "--adam-eps {}", default=1e-8),
    Row("max_grad_norm", "--clip-grad {}", default=1.0),
    Row("loss_type", "--loss-aggregation {}", LOSSES, default="dapo", lines=_loss),
    Row("epsilon", "--clip-eps-low {} --clip-eps-high {}", default=0.2, lines=_loss),
    Row("epsilon_high", "--clip-eps-high {}", lines=_loss),
    Row(
        "importance_sampling_level",
        "--policy-loss {}",
        {"sequence": "gspo", "token": "ppo"},
        default="token",
        lines=_loss,
    ),
    Row("delta", "--clip-ratio-c {}"),
    Row("beta", "--kl-coef {} --kl-mode loss", default=0.0, lines=_kl),
    Row(
        "scale_rewards",
        "{}",
        dict.fromkeys(("true", "group", "batch"), "--normalize-advantages-by-std")
        | dict.fromkeys(("false", "none"), "--no-normalize-advantages-by-std"),
        default="group",
        lines=_scale,
    ),
    Row("temperature", "--temperature {}", default=1.0),
    Row("top_p", "--top-p {}", default=1.0),
    Row("top_k", "--top-k {}", {"-1": 0, "none": 0}, default=0),
    Row("vllm_gpu_memory_utilization", "--rollout-gpu-memory-utilization {}", default=0.3, lines=_vllm),
    Row("vllm_tensor_parallel_size", "--rollout-tensor-parallel-size {}", default=1, lines=_vllm),
    Row("vllm_mode", instead="--rollout-engine says where vLLM runs", default="server", lines=_vllm),
    Row("use_vllm", instead="the engine is always vLLM", default=False, lines=_vllm),
    Row("vllm_importance_sampling_correction", instead="--tis-clip 2.0", default=True, lines=_vllm),
    Row("vllm_importance_sampling_cap", "--tis-clip {}", default=2.0, lines=_vllm),
    Row(
        "gradient_checkpointing",
        "{}",
        {"true": RECOMPUTE, "false": ""},
        default=True,
    ),
    Row("use_peft", instead="--lora-rank above 0", default=False, lines=_lora),
    Row("lora_r", "--lora-rank {}", default=16, lines=_lora),
    Row("lora_alpha", "--lora-alpha {}", default=32, lines=_lora),
    Row("lora_target_modules", "--lora-target-modules {}", default="all-linear", lines=_lora),
    Row("reward_funcs", "--reward-function {}", lines=_rewards),
    Row("output_dir", "--save {}", default="runs/trl"),
    Row("resume_from_checkpoint", "--load {}", note="a megarl run folder or checkpoint"),
    Row("save_strategy", instead="--save-interval counts steps", default="steps", lines=_intervals),
    Row("eval_strategy", instead="--eval-interval counts steps", default="no", lines=_intervals),
    Row("save_steps", "--save-interval {}", default=500, lines=_intervals),
    Row("eval_steps", "--eval-interval {}", lines=_intervals),
    Row("save_total_limit", "--keep {}"),
    Row("report_to", "--log-with {}", convert=known_trackers, default="none", lines=_loggers),
    Row("run_name", "--log-name {}"),
    Row("wandb_project", "--log-project {}"),
    # From here on: nothing to set.
    Row("reward_weights", instead="weigh the parts of the sum in your own --reward-function"),
    Row("eval_dataset dataset_test_split", instead="--eval-data FILE"),
    Row(
        "dataset_config dataset_configs dataset_train_split dataset_prompt_column dataset_num_proc "
        "system_prompt chat_template",
        instead="the rows are files: write the system prompt into the prompt column's messages",
    ),
    Row(
        "mask_truncated_completions",
        "{}",
        {"true": "--overlong-filter", "false": ""},
        default=False,
        lines=_loss,
    ),
    Row(
        "min_p repetition_penalty generation_kwargs top_entropy_quantile cache_implementation",
        instead="no counterpart: the engine samples from the policy itself",
    ),
    Row("sync_ref_model ref_model_*", instead="the reference stays as it was at the start"),
    Row("log_completions num_completions_to_print log_unique_prompts", instead="--num-rollouts-to-log N"),
    Row("num_generations_eval", "--eval-num-samples {}"),
    Row(
        "do_eval do_train per_device_eval_batch_size eval_on_start",
        instead="--eval-interval and --eval-num-prompts",
    ),
    Row(
        "logging_steps logging_* log_level log_on_each_node disable_tqdm",
        instead="metrics of every step go to metrics.jsonl in --save",
    ),
    Row(
        "push_to_hub hub_* overwrite_output_dir callbacks benchmarks wandb_* save_only_model "
        "save_safetensors",
        instead="hf/ in --save is the exported model; upload it afterwards",
    ),
    Row(
        "model_revision attn_implementation trust_remote_code model_init_kwargs load_in_4bit load_in_8bit "
        "bnb_* use_liger_kernel use_liger_loss optim tf32",
        instead="nothing to set: --model is a folder, its kernels are fused, the optimizer is Adam",
    ),
    Row(
        "gradient_checkpointing_kwargs remove_unused_columns disable_dropout ds3_gather_for_generation "
        "dataloader_* ddp_* torch_compile* torch_empty_cache_steps average_tokens_across_devices",
        instead="nothing to set",
    ),
    Row(
        "deepspeed deepspeed_config fsdp fsdp_config config_file mixed_precision",
        instead="Megatron trains: --use-distributed-optimizer shards Adam's state",
    ),
    Row("lora_dropout", instead="adapters have no dropout, as the engine's log-probs have none"),
    Row("lora_bias lora_task_type lora_modules_to_save use_rslora use_dora", instead="no counterpart"),
    Row("vllm_* use_transformers_paged", instead="an engine argument of vLLM: --rollout-NAME"),
    Row("processing_class args model peft_config", instead="nothing to set"),
)
