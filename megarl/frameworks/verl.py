"""Map verl's settings to megarl's flags.

The names are those of verl's `ppo_trainer` configuration, with the older names of the same settings."""

from __future__ import annotations

from megarl.frameworks import verl_lines as lines
from megarl.frameworks.rows import KL_ESTIMATORS, RECOMPUTE, STYLES, Row, known_trackers
from megarl.frameworks.verl_lines import ACTOR, LOSSES, MODEL, OVERRIDE, REF, ROLLOUT, SIZES, STYLE_NAMES

_PACKED = "sequences are packed up to --max-tokens-per-micro-batch tokens, whatever their number"

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
    Row("data.train_batch_size", "--num-prompts {}", default=1024),
    Row(f"{ROLLOUT}.n", "--num-samples-per-prompt {}", default=1),
    Row(
        f"{ACTOR}.ppo_mini_batch_size",
        "--global-batch-size {}",
        times="num-samples-per-prompt",
        default=256,
        note="verl counts prompts, megarl samples",
    ),
    Row(f"{ACTOR}.ppo_epochs", "--num-epochs {}", default=1),
    Row("trainer.total_training_steps", "--train-iters {}", lines=lines.steps),
    Row(
        "trainer.total_epochs",
        instead="--train-iters = epochs x (rows // --num-prompts)",
        default=30,
        lines=lines.steps,
    ),
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
        )
    ),
    Row(f"{ACTOR}.optim.min_lr", "--min-lr {}"),
    Row(f"{ACTOR}.optim.lr_decay_steps", "--lr-decay-iters {}"),
    Row(f"{ACTOR}.optim.weight_decay", "--weight-decay {}", default=0.01),
    Row(
        f"{ACTOR}.optim.betas",
        instead="--adam-beta1 and --adam-beta2 take one number each",
        default=[0.9, 0.999],
        lines=lines.betas,
    ),
    Row(f"{ACTOR}.grad_clip {ACTOR}.optim.clip_grad", "--clip-grad {}", default=1.0),
    Row("critic.grad_clip critic.optim.clip_grad", "--critic-clip-grad {}"),
    Row("critic.optim.weight_decay", "--critic-weight-decay {}"),
    Row(f"{ACTOR}.clip_ratio", "--clip-eps-low {} --clip-eps-high {}", default=0.2, lines=lines.clip),
    Row(f"{ACTOR}.clip_ratio_low", "--clip-eps-low {}", lines=lines.clip),
    Row(f"{ACTOR}.clip_ratio_high", "--clip-eps-high {}", lines=lines.clip),
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
    Row(f"{ACTOR}.kl_loss_type", "--kl-estimator {}", KL_ESTIMATORS, default="low_var_kl", lines=lines.kl),
    Row("algorithm.kl_penalty", "--kl-estimator {}", KL_ESTIMATORS, default="kl", lines=lines.kl),
    Row("algorithm.kl_ctrl.type", "--kl-controller {}", default="fixed", lines=lines.kl),
    Row(
        "algorithm.kl_ctrl.target_kl",
        instead="--kl-target is in nats per response, this one per token",
        default=0.1,
        lines=lines.kl,
    ),
    Row("algorithm.kl_ctrl.horizon", "--kl-horizon {}", default=10000, lines=lines.kl),
    Row("algorithm.rollout_correction.rollout_is_threshold algorithm.rollout_is_threshold", "--tis-clip {}"),
    Row(f"{ACTOR}.tis_imp_ratio_cap", "--tis-clip {}"),
    Row(f"{ROLLOUT}.temperature", "--temperature {}", default=1.0),
    Row(f"{ROLLOUT}.top_p", "--top-p {}", default=1.0),
    Row(f"{ROLLOUT}.top_k", "--top-k {}", {"-1": 0}, default=-1),
    Row(
        f"{ROLLOUT}.tensor_model_parallel_size",
        "--rollout-tensor-parallel-size {}",
        default=2,
    ),
    Row(
        f"{ROLLOUT}.free_cache_engine",
        "--no-rollout-release-kv-cache",
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
    Row(f"{MODEL}.lora_rank", "--lora-rank {}", default=0, lines=lines.adapters),
    Row(f"{MODEL}.lora_alpha", "--lora-alpha {}", default=16, lines=lines.adapters),
    Row(f"{MODEL}.target_modules", "--lora-target-modules {}", default="all-linear", lines=lines.adapters),
    Row(f"{MODEL}.lora.rank", "--lora-rank {}", lines=lines.adapters),
    Row(f"{MODEL}.lora.alpha", "--lora-alpha {}", lines=lines.adapters),
    Row(f"{MODEL}.lora.target_modules", "--lora-target-modules {}", lines=lines.adapters),
    Row("trainer.n_gpus_per_node", "--nproc-per-node {}", default=8, lines=lines.ranks),
    Row(
        "trainer.nnodes",
        instead="one torchrun per node: torchrun --nnodes N --nproc-per-node 8 -m megarl.train @FILE",
        default=1,
        lines=lines.ranks,
    ),
    Row(
        "rollout.nnodes rollout.n_gpus_per_node",
        instead="--actor-ranks and --rollout-ranks give trainer and engines devices of their own, and "
        "--nproc-per-node counts both",
    ),
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
    Row("actor_rollout_ref.nccl_timeout", "--call-timeout-s {}"),
    # From here on: nothing to set.
    Row(
        f"{ACTOR}.ppo_micro_batch_size* critic.ppo_micro_batch_size* critic.forward_micro_batch_size* "
        f"*.log_prob_micro_batch_size* {ACTOR}.use_dynamic_bsz critic.use_dynamic_bsz "
        "*.log_prob_use_dynamic_bsz "
        "reward_model.micro_batch_size* reward_model.use_dynamic_bsz *.log_prob_max_token_len_per_gpu "
        "critic.ppo_max_token_len_per_gpu critic.forward_max_token_len_per_gpu",
        instead=_PACKED,
    ),
    Row("critic.ppo_mini_batch_size", instead="the critic's updates have --global-batch-size too"),
    Row("critic.ppo_epochs", instead="the critic's updates have --num-epochs too"),
    Row("*.use_remove_padding *.use_rmpad", instead="there is no padding to remove"),
    Row("trainer.balance_batch", instead="tokens are always balanced over the ranks"),
    Row(
        "data.filter_overlong_prompts* data.truncation",
        instead="a prompt above --max-prompt-length is an error: remove such rows from the data",
    ),
    Row("data.val_batch_size", instead="--eval-num-prompts limits the rows of an evaluation"),
    Row("algorithm.filter_groups.enable", "{}", {"true": "--dynamic-sampling", "false": ""}),
    Row(
        "algorithm.filter_groups.max_num_gen_batches",
        "--max-sampling-rounds {}",
        {"0": 1000},
        note="0 is no limit in verl",
    ),
    Row(
        "algorithm.filter_groups.metric",
        instead="--dynamic-sampling compares rewards without the penalty of long responses",
    ),
    Row(
        "data.gen_batch_size",
        instead="a first round of --dynamic-sampling has --num-prompts, and further ones what is missing",
    ),
    Row(f"{ROLLOUT}.val_kwargs.n", "--eval-num-samples {}", default=1),
    Row(
        f"{ROLLOUT}.val_kwargs.*",
        instead="an evaluation decodes greedily, and samples at --temperature; megarl eval takes --top-p too",
    ),
    Row(
        "trainer.val_before_train",
        instead="with --eval-interval there is an evaluation before the first step",
    ),
    Row("trainer.val_only", instead="megarl eval @FILE evaluates only"),
    Row(f"{ROLLOUT}.name", instead="the engine is vLLM"),
    Row(f"{ROLLOUT}.mode", instead="--rollout-engine says where vLLM runs"),
    Row(
        f"{ROLLOUT}.load_format {ROLLOUT}.layered_summon {ROLLOUT}.dtype "
        f"{ROLLOUT}.*update_weights_bucket_megabytes {ROLLOUT}.multi_stage_wake_up",
        instead="the engine's memory and weights are managed by megarl",
    ),
    Row(
        f"{ROLLOUT}.do_sample {ROLLOUT}.ignore_eos {ROLLOUT}.prompt_length {ROLLOUT}.response_length "
        f"{ROLLOUT}.max_model_len",
        instead="set by --temperature, --max-prompt-length and --max-response-length",
    ),
    Row(
        f"{ROLLOUT}.data_parallel_size {ROLLOUT}.expert_parallel_size {ROLLOUT}.pipeline_model_parallel_size",
        instead="--rollout-ranks form as many engines as fit; an engine is split by tensors only",
    ),
    Row(f"{ROLLOUT}.calculate_log_probs", instead="the engine's log-probs are always returned and compared"),
    Row(f"{ROLLOUT}.multi_turn.*", instead="a row is one prompt and one response; turns are not supported"),
    Row(f"{ROLLOUT}.*kwargs.*", instead="an engine argument of vLLM: --rollout-NAME"),
    Row(
        f"{ACTOR}.strategy {REF}.strategy critic.strategy reward_model.strategy model_engine "
        f"*.fsdp_config.* *.fsdp_size",
        instead="Megatron trains: --use-distributed-optimizer shards Adam's state, --use-megatron-fsdp more",
    ),
    Row(f"{OVERRIDE}.optimizer_cpu_offload", "--optimizer-cpu-offload", default=False, lines=lines.offload),
    Row(
        f"{OVERRIDE}.optimizer_offload_fraction",
        "--optimizer-offload-fraction {}",
        default=1.0,
        lines=lines.offload,
    ),
    Row(
        "*.override_transformer_config.* *.override_ddp_config.* *.override_optimizer_config.*",
        instead="a field of Megatron's TransformerConfig is a flag of the same name; megarl sets most itself",
    ),
    Row(f"{MODEL}.override_config.* critic.model.override_config.*", instead="change --model's config.json"),
    Row(
        "*.use_dist_checkpointing *.use_mbridge *.dist_checkpointing_path", instead="--model is read directly"
    ),
    Row("*.megatron.*", instead="Megatron's own flags have Megatron's own names here"),
    Row(
        "critic.model.enable_gradient_checkpointing *.enable_activation_offload",
        instead="--critic-recompute-granularity and the like set it for one role",
    ),
    Row("reward_model.reward_manager", instead="the built-in rules are chosen by --reward and data_source"),
    Row(
        "reward_model.reward_kwargs.* custom_reward_function.overlong_buffer.* "
        "reward_model.overlong_buffer.*",
        instead="--overlong-buffer and --overlong-penalty are DAPO's penalty of long responses",
    ),
    Row(
        "*.use_shm *.use_liger *.use_fused_kernels *.use_torch_compile *.trust_remote_code *.external_lib "
        "*.fused_kernel_options.* *.attn_implementation *.exclude_modules *.custom_chat_template",
        instead="nothing to set: the kernels are fused, and no code of a model's folder is run",
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
    Row(
        f"{ACTOR}.policy_loss.*",
        instead="`megarl algorithms` lists the losses; docs/algorithms.md says how to add one",
    ),
    Row(f"{ACTOR}.shuffle critic.shuffle", instead="mini-batches are drawn by --seed"),
    Row(
        "data.return_raw_chat data.return_raw_input_ids data.return_full_prompt data.reward_fn_key "
        "data.image_key data.video_key data.trust_remote_code data.use_shm data.dataloader_num_workers "
        "data.return_multi_modal_inputs data.validation_shuffle",
        instead="nothing to set: docs/data_and_rewards.md lists the columns",
    ),
    Row("data.custom_cls.* data.sampler.* data.datagen.*", instead="prepare the rows as a file instead"),
    Row("data.apply_chat_template_kwargs.*", instead="the tokenizer's template is used as it is"),
    Row(
        "actor_rollout_ref.hybrid_engine",
        instead="roles share ranks unless --actor-ranks and the like say otherwise",
    ),
    Row(
        "trainer.default_hdfs_dir trainer.del_local_ckpt_after_load trainer.device", instead="nothing to set"
    ),
    Row(
        "async_training.staleness_threshold",
        instead="--staleness counts whole training steps; 1 is the nearest to any threshold up to 1",
    ),
    Row(
        "async_training.partial_rollout",
        instead="--weight-update recompute, the default of --staleness; wait is partial_rollout=False",
    ),
    Row(
        "async_training.*",
        instead="--staleness 1 makes rollouts asynchronous (docs/asynchronous.md)",
    ),
    Row(
        "trainer.ray_wait_register_center_timeout trainer.use_legacy_worker_impl ray_init.* ray_kwargs.* "
        "trainer.esi_redundant_time",
        instead="there is no Ray",
    ),
    Row(
        "*.checkpoint.* trainer.rollout_data_dir trainer.validation_data_dir",
        instead="--save holds checkpoints/, rollouts/ and hf/",
    ),
    Row(
        "*profiler.* trainer.profile_steps",
        instead="--profile torch --profile-step-start N (docs/profiling.md)",
    ),
    Row(
        "algorithm.use_pf_ppo algorithm.pf_ppo.* algorithm.rollout_correction.* "
        "*.entropy_from_logits_with_chunking "
        f"*.entropy_checkpointing {ROLLOUT}.agent.* {ROLLOUT}.trace.* {ROLLOUT}.over_sample_rate "
        f"{ROLLOUT}.disable_log_stats {ROLLOUT}.skip_* {ROLLOUT}.cudagraph_capture_sizes "
        "critic.rollout_n critic.loss_agg_mode critic.enable critic.model.* critic.optim.* "
        "*.optim.num_cycles "
        "*.optim.total_training_steps *.ulysses_sequence_parallel_size reward_model.* *._target_ "
        f"{REF}.model {REF}.* {ACTOR}.optim.optimizer {MODEL}.lora.* {MODEL}.mtp.* {ROLLOUT}.prometheus.*",
        instead="no counterpart",
    ),
)
