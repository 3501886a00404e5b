"""Map verl's settings to megarl's flags.

The names are those of verl's `ppo_trainer` configuration, with the older names of the same settings."""

from __future__ import annotations

from megarl.frameworks import verl_batches as batches
from megarl.frameworks import verl_corrections, verl_remarks
from megarl.frameworks import verl_lines as lines
from megarl.frameworks.rows import KL_FLAGS, RECOMPUTE, START, STYLES, Row, known_trackers, lora_modules
from megarl.frameworks.verl_lines import ACTOR, LOSSES, MODEL, OVERRIDE, REF, ROLLOUT, SIZES, STYLE_NAMES

TABLE = (
    Row(
        "algorithm.adv_estimator",
        "--algorithm {}",
        convert=lines.nearest_algorithm,
        default="gae",
        lines=lines.algorithm,
    ),
    Row(
        "algorithm.gamma",
        "--gamma {}",
        default=1.0,
        instead="rewards are discounted by --algorithm ppo only",
        lines=lines.algorithm,
    ),
    Row("algorithm.lam", "--gae-lambda {}", default=1.0, lines=lines.algorithm),
    Row("critic.cliprange_value", "--value-clip-eps {}", default=0.5, lines=lines.algorithm),
    Row("trainer.critic_warmup", "--critic-warmup-iters {}", default=0, lines=lines.algorithm),
    Row(
        "algorithm.norm_adv_by_std_in_grpo",
        "{}",
        {"true": "--normalize-advantages-by-std", "false": "--no-normalize-advantages-by-std"},
        default=True,
        lines=lines.algorithm,
    ),
    Row(f"{MODEL}.path", "--model {}", lines=lines.model),
    Row("critic.model.path", "--critic-model {}", lines=lines.model),
    Row("data.tokenizer", "--tokenizer-model {}"),
    Row("data.train_files", "--train-data {}", lines=lines.files),
    Row("data.val_files", "--eval-data {}", lines=lines.files),
    Row("data.prompt_key", "--prompt-key {}", default="prompt"),
    Row("data.shuffle", "{}", {"true": "--shuffle", "false": "--no-shuffle"}, default=True),
    Row("data.max_prompt_length", "--max-prompt-length {}", default=512),
    Row("data.max_response_length", "--max-response-length {}", default=512),
    Row("data.seed", "--seed {}"),
    Row("data.train_batch_size", "--num-prompts {}", default=1024, lines=batches.prompts),
    *(
        Row(name, instead=batches.FULLY_ASYNC, default=default, lines=batches.prompts)
        for name, default in zip(batches.SYNC_INTERVAL, (1, 4), strict=True)
    ),
    Row(f"{ROLLOUT}.n", "--num-samples-per-prompt {}", default=1),
    Row(
        f"{ACTOR}.ppo_mini_batch_size",
        "--global-batch-size {}",
        times="num-samples-per-prompt",
        default=256,
        note="verl counts prompts, megarl samples",
    ),
    Row(f"{ACTOR}.ppo_epochs", "--num-epochs {}", default=1),
    Row("trainer.total_training_steps", "--train-iters {}", lines=batches.steps),
    Row(
        "trainer.total_epochs",
        instead="--train-iters = epochs x (rows // --num-prompts)",
        default=30,
        lines=batches.steps,
    ),
    Row("rollout.total_rollout_steps", instead="--train-iters = it // --num-prompts", lines=batches.steps),
    Row(f"{ACTOR}.optim.lr", "--lr {}", default=1e-6, lines=lines.rates),
    Row("critic.optim.lr", "--critic-lr {}", default=1e-5, lines=lines.rates),
    *(
        row
        for role, there in (("", ACTOR), ("critic-", "critic"))
        for row in (
            Row(f"{there}.optim.lr_warmup_steps", f"--{role}lr-warmup-iters {{}}", lines=lines.rates),
            Row(
                f"{there}.optim.lr_warmup_steps_ratio",
                f"--{role}lr-warmup-iters {{}}",
                times="train-iters",
                default=0.0,
                lines=lines.rates,
            ),
            Row(
                " ".join(f"{there}.optim.{name}" for name in STYLE_NAMES),
                f"--{role}lr-decay-style {{}}",
                STYLES,
                lines=lines.rates,
            ),
            Row(f"{there}.optim.min_lr_ratio", f"--{role}min-lr {{}}", times=f"{role}lr", lines=lines.rates),
            Row(f"{there}.optim.min_lr", f"--{role}min-lr {{}}", lines=lines.rates),
            Row(f"{there}.optim.lr_decay_steps", f"--{role}lr-decay-iters {{}}", lines=lines.rates),
        )
    ),
    *lines.rows_per_role("weight-decay", "optim.weight_decay", default=0.01),
    *lines.rows_per_role("clip-grad", "grad_clip optim.clip_grad", default=1.0),
    Row(
        f"{ACTOR}.optim.betas critic.optim.betas",
        instead="--adam-beta1 and --adam-beta2 take one number each",
        default=[0.9, 0.999],
        lines=lines.betas,
    ),
    Row(f"{ACTOR}.clip_ratio", "--clip-eps-low {} --clip-eps-high {}", default=0.2, lines=lines.clip),
    Row(f"{ACTOR}.clip_ratio_low", "--clip-eps-low {}", default=0.2, lines=lines.clip),
    Row(f"{ACTOR}.clip_ratio_high", "--clip-eps-high {}", default=0.2, lines=lines.clip),
    Row(f"{ACTOR}.clip_ratio_c", "--clip-ratio-c {}", default=3.0, lines=lines.clip),
    Row(
        f"{ACTOR}.loss_agg_mode",
        "--loss-aggregation {}",
        lines.AGGREGATIONS,
        default="token-mean",
        lines=lines.aggregation,
    ),
    Row(
        f"{ACTOR}.use_token_level_loss",
        "--loss-aggregation {}",
        {"true": "token-mean", "false": "seq-mean-token-mean"},
        lines=lines.aggregation,
    ),
    Row(f"{ACTOR}.entropy_coeff", "--entropy-coef {}", default=0),
    Row(
        f"{ACTOR}.use_kl_loss",
        "--kl-mode {}",
        {"true": "loss", "false": "none"},
        default=False,
        lines=lines.kl,
    ),
    Row(
        "algorithm.use_kl_in_reward",
        "--kl-mode {}",
        {"true": "reward", "false": "none"},
        default=False,
        lines=lines.kl,
    ),
    Row(f"{ACTOR}.kl_loss_coef", "--kl-coef {} --kl-mode loss", default=0.001, lines=lines.kl),
    Row("algorithm.kl_ctrl.kl_coef", "--kl-coef {} --kl-mode reward", default=0.001, lines=lines.kl),
    Row(f"{REF}.model.path", "--reference-model {}", lines=lines.kl),
    Row(f"{ACTOR}.kl_loss_type", "{}", KL_FLAGS, default="low_var_kl", lines=lines.kl),
    Row("algorithm.kl_penalty", "--kl-estimator {}", lines.KL_IN_REWARD, default="kl", lines=lines.kl),
    Row("algorithm.kl_ctrl.type", "--kl-controller {}", default="fixed", lines=lines.kl),
    Row(
        "algorithm.kl_ctrl.target_kl",
        instead="--kl-target is in nats per response, this one per token",
        default=0.1,
        lines=lines.kl,
    ),
    Row("algorithm.kl_ctrl.horizon", "--kl-horizon {}", default=10000, lines=lines.kl),
    *verl_corrections.ROWS,
    Row(f"{ROLLOUT}.name", "{}", {"vllm": "", "hf": "--rollout-backend transformers"}),
    Row(f"{ROLLOUT}.temperature", "--temperature {}", default=1.0),
    Row(f"{ROLLOUT}.top_p", "--top-p {}", default=1.0),
    Row(f"{ROLLOUT}.top_k", "--top-k {}", {"-1": 0}, default=-1),
    Row(
        f"{ROLLOUT}.tensor_model_parallel_size",
        "--rollout-tensor-parallel-size {}",
        default=2,
        lines=lines.engine_size,
    ),
    Row(
        f"{ROLLOUT}.free_cache_engine",
        "{}",
        {"true": "--rollout-release-kv-cache", "false": "--no-rollout-release-kv-cache"},
        default=True,
        lines=lines.kv_cache,
    ),
    Row(f"{ROLLOUT}.gpu_memory_utilization", "--rollout-gpu-memory-utilization {}", default=0.5),
    Row(f"{ROLLOUT}.max_num_seqs", "--rollout-max-num-seqs {}", default=1024),
    Row(f"{ROLLOUT}.max_num_batched_tokens", "--rollout-max-num-batched-tokens {}", default=8192),
    Row(
        f"{ROLLOUT}.enforce_eager",
        "{}",
        {"true": "--rollout-enforce-eager", "false": "--no-rollout-enforce-eager"},
    ),
    Row(
        f"{ROLLOUT}.enable_prefix_caching",
        "{}",
        {"true": "--rollout-enable-prefix-caching", "false": "--no-rollout-enable-prefix-caching"},
    ),
    Row(
        f"{ROLLOUT}.enable_chunked_prefill",
        "{}",
        {"true": "--rollout-enable-chunked-prefill", "false": "--no-rollout-enable-chunked-prefill"},
    ),
    *(
        Row(f"{there}.megatron.{size}", f"--{role}{size.replace('_', '-')} {{}}", lines=lines.sizes)
        for role, there in (("", ACTOR), ("reference-", REF), ("critic-", "critic"))
        for size in SIZES
    ),
    Row(
        f"{ACTOR}.megatron.sequence_parallel",
        "{}",
        {"true": "--sequence-parallel", "false": "--no-sequence-parallel"},
        default=True,
        lines=lines.sizes,
    ),
    Row(
        f"{ACTOR}.ulysses_sequence_parallel_size",
        "--context-parallel-size {}",
        note="Megatron's ring over the sequence in place of Ulysses' all-to-all",
    ),
    Row(
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "--max-tokens-per-micro-batch {}",
        times="context-parallel-size",
        default=16384,
    ),
    Row(f"{MODEL}.enable_gradient_checkpointing", "{}", {"true": RECOMPUTE, "false": ""}, default=True),
    *(
        Row(f"{there}.{name}", f"--{role}{flag} {{}}", convert=convert, default=default, lines=lines.adapters)
        for role, there in (("", MODEL), ("critic-", "critic.model"))
        for name, flag, convert, default in (
            ("lora_rank", "lora-rank", None, 0),
            ("lora_alpha", "lora-alpha", None, 16),
            ("target_modules", "lora-target-modules", lora_modules, "all-linear"),
            ("lora.rank", "lora-rank", None, 0),
            ("lora.alpha", "lora-alpha", None, 32),
            ("lora.target_modules", "lora-target-modules", lora_modules, "all-linear"),
        )
    ),
    Row("trainer.n_gpus_per_node", "--nproc-per-node {}", default=8, lines=batches.ranks),
    Row("trainer.nnodes", "--nnodes {}", note=START, default=1, lines=batches.ranks),
    *(
        Row(
            f"rollout.{name}",
            default=default,
            instead=batches.SEPARATE,
            lines=batches.ranks,
        )
        for name, default in (("nnodes", 1), ("n_gpus_per_node", 8))
    ),
    Row("one_step_off_policy", "--staleness 1 --weight-update wait", note="samples while it trains"),
    Row("fully_async_policy", "--staleness 1", note="samples while it trains"),
    Row(
        " ".join(
            f"{role}.{engine}.{part}_offload"
            for role in (ACTOR, REF)
            for engine in ("fsdp_config", "megatron")
            for part in ("param", "grad", "optimizer")
        ),
        instead="name the parts: --actor-offload parameters gradients optimizer",
        lines=lines.offload,
    ),
    Row("reward_model.model.path", "--reward-model {}", lines=lines.rewards),
    Row("reward_model.enable", instead="--reward-model names the folder", lines=lines.rewards),
    Row(
        "custom_reward_function.path reward.custom_reward_function.path",
        "--reward-function {}:compute_score",
        lines=lines.rewards,
    ),
    Row(
        "custom_reward_function.name reward.custom_reward_function.name",
        instead="append the name to the file: --reward-function FILE:NAME",
        default="compute_score",
        lines=lines.rewards,
    ),
    Row("trainer.default_local_dir", "--save {}", lines=lines.folder),
    Row("trainer.resume_mode", instead="--load FOLDER", default="auto", lines=lines.folder),
    Row("trainer.resume_from_path", "--load {}", lines=lines.folder),
    Row("trainer.save_freq", "--save-interval {}", {"-1": 0}, default=-1, lines=lines.intervals),
    Row("trainer.test_freq", "--eval-interval {}", {"-1": 0}, default=-1, lines=lines.intervals),
    Row("trainer.max_actor_ckpt_to_keep", "--keep {}", lines=lines.intervals),
    Row("trainer.max_critic_ckpt_to_keep", instead="--keep counts checkpoints of all roles"),
    Row(
        "trainer.logger",
        "--log-with {}",
        convert=known_trackers,
        default="['console', 'wandb']",
        lines=lines.loggers,
    ),
    Row("trainer.project_name", "--log-project {}", default="verl_examples"),
    Row("trainer.experiment_name", "--log-name {}", default="gsm8k"),
    Row("trainer.log_val_generations", "--num-rollouts-to-log {}", {"0": 32}, note="per step"),
    Row(
        "algorithm.filter_groups.enable",
        "{}",
        {"true": "--dynamic-sampling", "false": ""},
        lines=lines.groups,
    ),
    Row(
        "algorithm.filter_groups.max_num_gen_batches",
        "--max-sampling-rounds {}",
        {"0": 1000},
        lines=lines.groups,
    ),
    Row(f"{ROLLOUT}.val_kwargs.n", "--eval-num-samples {}", default=1),
    Row(
        f"{OVERRIDE}.optimizer_cpu_offload",
        "{}",
        {"true": "--optimizer-cpu-offload", "false": "--no-optimizer-cpu-offload"},
        default=False,
        lines=lines.offload,
    ),
    Row(
        f"{OVERRIDE}.optimizer_offload_fraction",
        "--optimizer-offload-fraction {}",
        default=1.0,
        lines=lines.offload,
    ),
    Row(f"{ACTOR}.policy_loss.loss_mode", "--policy-loss {}", LOSSES, default="vanilla", lines=lines.clip),
    Row(
        f"{ACTOR}.router_replay.mode",
        "--moe-routing-replay {}",
        {"r2": "policy", "r3": "engine", "disabled": "none"},
    ),
    *(
        Row(f"{ACTOR}.{name}", f"--{flag} {{}}", default=default, lines=lines.clip)
        for name, flag, default in (
            ("policy_loss.clip_cov_ratio", "cov-share", 2e-4),
            ("policy_loss.clip_cov_lb", "cov-low", 1.0),
            ("policy_loss.clip_cov_ub", "cov-high", 5.0),
            ("policy_loss.kl_cov_ratio", "cov-share", 2e-4),
            ("policy_loss.ppo_kl_coef", "cov-kl-coef", 0.1),
            ("tau_pos", "sapo-tau-pos", 1.0),
            ("tau_neg", "sapo-tau-neg", 1.05),
        )
    ),
    *verl_remarks.ROWS,
)
