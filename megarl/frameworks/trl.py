"""Map the settings of TRL's GRPOConfig and GRPOTrainer to megarl's flags.

Arguments of the trainer, of its adapters (LoraConfig) and of `accelerate launch` are in the same table."""

from __future__ import annotations

from megarl.frameworks import trl_lines as lines
from megarl.frameworks.rows import RECOMPUTE, START, STYLES, Row, known_trackers, lora_modules
from megarl.frameworks.trl_lines import BATCH, LOSS_FLAGS

WARMUP = "--lr-warmup-iters counts steps; without it there is no warm-up"

TABLE = (
    Row("model_name_or_path", "--model {}", lines=lines.model),
    Row("bf16", "{}", {"true": "--bf16", "false": "--no-bf16"}, default=True, lines=lines.model),
    Row("torch_dtype dtype", "{}", {"bfloat16": "--bf16", "float32": "--no-bf16"}, lines=lines.model),
    Row(
        "fp16",
        instead="float16 training is not supported. Use --bf16, or fp32",
        default=False,
        lines=lines.model,
    ),
    Row("train_dataset dataset_name", "--train-data {}", lines=lines.data),
    Row("seed", "--seed {}", default=42),
    Row("shuffle_dataset", "{}", {"true": "--shuffle", "false": "--no-shuffle"}, default=True),
    Row(
        "max_prompt_length", "--max-prompt-length {}", note="TRL cuts longer prompts; here they are an error"
    ),
    Row("max_completion_length", "--max-response-length {}", default=512),
    Row(
        "per_device_train_batch_size",
        instead=f"--global-batch-size = {BATCH}",
        default=8,
        lines=lines.batch,
    ),
    Row(
        "gradient_accumulation_steps", instead=f"--global-batch-size = {BATCH}", default=1, lines=lines.batch
    ),
    Row("num_generations", "--num-samples-per-prompt {}", default=8, lines=lines.batch),
    Row(
        "generation_batch_size steps_per_generation",
        instead="--num-prompts = samples of one generation / num_generations",
        lines=lines.batch,
    ),
    Row("num_processes", "--nproc-per-node {}", lines=lines.batch),
    Row("num_machines", "--nnodes {}", note=START, default=1, lines=lines.batch),
    Row("num_iterations", "--num-epochs {}", default=1, lines=lines.batch),
    Row(
        "max_steps", "--train-iters {}", note="updates there, generations here", default=-1, lines=lines.steps
    ),
    Row(
        "num_train_epochs",
        instead="--train-iters = epochs x (rows // --num-prompts)",
        default=3,
        lines=lines.steps,
    ),
    Row("learning_rate", "--lr {}", default=1e-6, lines=lines.rate),
    Row("lr_scheduler_type", "--lr-decay-style {}", STYLES, default="linear", lines=lines.rate),
    Row("lr_scheduler_kwargs", instead="--min-lr is the rate at the end", lines=lines.rate),
    Row("warmup_steps", "--lr-warmup-iters {}", default=0, instead=WARMUP, lines=lines.rate),
    Row(
        "warmup_ratio",
        "--lr-warmup-iters {}",
        times="train-iters",
        default=0,
        instead=WARMUP,
        lines=lines.rate,
    ),
    Row("weight_decay", "--weight-decay {}", default=0.0),
    Row("adam_beta1", "--adam-beta1 {}", default=0.9),
    Row("adam_beta2", "--adam-beta2 {}", default=0.999),
    Row("adam_epsilon", "--adam-eps {}", default=1e-8),
    Row("max_grad_norm", "--clip-grad {}", default=1.0),
    Row(
        "loss_type",
        "{}",
        LOSS_FLAGS,
        default="dapo",
        lines=lines.loss,
    ),
    Row("epsilon", "--clip-eps-low {} --clip-eps-high {}", default=0.2, lines=lines.loss),
    Row("epsilon_high", "--clip-eps-high {}", lines=lines.loss),
    Row(
        "importance_sampling_level",
        "--policy-loss {}",
        {"sequence": "gspo", "token": "ppo"},
        default="token",
        lines=lines.loss,
    ),
    Row("delta", "--clip-ratio-c {}", lines=lines.loss),
    Row("sapo_temperature_pos", "--sapo-tau-pos {}", default=1.0, lines=lines.loss),
    Row("sapo_temperature_neg", "--sapo-tau-neg {}", default=1.05, lines=lines.loss),
    Row("beta", "--kl-coef {} --kl-mode loss", default=0.0, lines=lines.kl),
    Row("entropy_coef", "--entropy-coef {}", default=0.0),
    Row(
        "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
        instead="--entropy-coef stays the same",
    ),
    Row(
        "scale_rewards",
        "{}",
        dict.fromkeys(("true", "group", "batch"), "--normalize-advantages-by-std")
        | dict.fromkeys(("false", "none"), "--no-normalize-advantages-by-std"),
        default="group",
        lines=lines.scale,
    ),
    Row("temperature", "--temperature {}", default=1.0),
    Row("top_p", "--top-p {}", default=1.0),
    Row("top_k", "--top-k {}", {"-1": 0, "none": 0}, default=0),
    Row("vllm_gpu_memory_utilization", "--rollout-gpu-memory-utilization {}", default=0.3, lines=lines.vllm),
    Row("vllm_tensor_parallel_size", "--rollout-tensor-parallel-size {}", default=1, lines=lines.vllm),
    Row("vllm_mode", instead="--rollout-engine says where vLLM runs", default="colocate", lines=lines.vllm),
    Row(
        "use_vllm",
        instead="vLLM samples unless --rollout-backend transformers is given",
        default=False,
        lines=lines.vllm,
    ),
    Row("vllm_importance_sampling_correction", instead="--tis-clip 2.0", default=True, lines=lines.vllm),
    Row(
        "vllm_importance_sampling_mode",
        "{}",
        {
            f"{level}_{how}": f"--{flag} {level}"
            for level in ("token", "sequence")
            for how, flag in (("mask", "mis-level"), ("truncate", "tis-clip 3.0 --tis-level"))
        },
        default="sequence_mask",
        lines=lines.vllm,
    ),
    Row("vllm_importance_sampling_cap", "--tis-clip {}", lines=lines.vllm),
    Row("vllm_importance_sampling_clip_max", "--tis-clip {}", default=3.0, lines=lines.vllm),
    Row("vllm_importance_sampling_clip_min", "--mis-low {}", lines=lines.vllm),
    Row(
        "gradient_checkpointing",
        "{}",
        {"true": RECOMPUTE, "false": ""},
        default=True,
    ),
    Row("use_peft", instead="--lora-rank above 0", default=False, lines=lines.adapters),
    Row("lora_r", "--lora-rank {}", default=16, lines=lines.adapters),
    Row("lora_alpha", "--lora-alpha {}", default=32, lines=lines.adapters),
    Row(
        "lora_target_modules",
        "--lora-target-modules {}",
        convert=lora_modules,
        default="all-linear",
        lines=lines.adapters,
    ),
    Row("reward_funcs", "--reward-function {}", lines=lines.rewards),
    Row("output_dir", "--save {}", default="trainer_output"),
    Row("resume_from_checkpoint", "--load {}", note="a megarl run folder or checkpoint"),
    Row("save_strategy", instead="--save-interval counts steps", default="steps", lines=lines.intervals),
    Row("eval_strategy", instead="--eval-interval counts steps", default="no", lines=lines.intervals),
    Row("save_steps", "--save-interval {}", default=500, lines=lines.intervals),
    Row("eval_steps", "--eval-interval {}", lines=lines.intervals),
    Row("save_total_limit", "--keep {}"),
    Row("report_to", "--log-with {}", convert=known_trackers, default="none", lines=lines.loggers),
    Row("run_name", "--log-name {}"),
    Row("wandb_project", "--log-project {}"),
    Row(
        "max_staleness",
        "--staleness {}",
        note="no sample is discarded for its age (docs/asynchronous.md)",
    ),
    # From here on: nothing to set.
    Row(
        "reward_weights multi_objective_aggregation",
        instead="--score-weights NAME=WEIGHT ... weighs the scores that a --reward-function returns by name; "
        "normalize_then_sum is --algorithm gdpo",
    ),
    Row(
        "tools environment_factory rollout_func max_tool_calling_iterations",
        instead="turns come from --env FILE.py:CLASS or --agent-command (docs/agents.md)",
    ),
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
        lines=lines.loss,
    ),
    Row(
        "min_p repetition_penalty generation_kwargs top_entropy_quantile cache_implementation",
        instead="no counterpart: the engine samples from the policy itself",
    ),
    Row(
        "sync_ref_model ref_model_*",
        instead="--reference-update-interval N makes the reference a copy of the actor every N steps, as "
        "ref_model_mixup_alpha 1 does",
    ),
    Row("log_completions num_completions_to_print log_unique_prompts", instead="--num-rollouts-to-log N"),
    Row("num_generations_eval", "--eval-num-samples {}"),
    Row(
        "do_eval do_train per_device_eval_batch_size eval_on_start",
        instead="--eval-interval and --eval-num-prompts",
    ),
    Row(
        "logging_steps",
        instead="metrics of every step go to metrics.jsonl in --save",
        default=10,
    ),
    Row(
        "logging_* log_level log_on_each_node disable_tqdm",
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
        instead="Megatron trains: --use-distributed-optimizer shards Adam's state, --use-megatron-fsdp more",
    ),
    Row("lora_dropout", instead="adapters have no dropout, as the engine's log-probs have none"),
    Row("lora_bias lora_task_type lora_modules_to_save use_rslora use_dora", instead="no counterpart"),
    Row(
        "vllm_server_* vllm_group_port",
        instead="megarl starts the engines itself; --rollout-ranks and --rollout-engine say where",
    ),
    Row("use_transformers_paged", instead="--rollout-backend transformers, if vLLM is not to sample"),
    Row("vllm_*", instead="an engine argument of vLLM: --rollout-NAME"),
)
