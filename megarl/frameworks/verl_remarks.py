"""Say what to do about those of verl's settings for which no flag has the same meaning."""

from __future__ import annotations

from megarl.frameworks.rows import Row
from megarl.frameworks.verl_lines import ACTOR, MODEL, REF, ROLLOUT

ROWS = (
    Row(
        f"{ACTOR}.ppo_micro_batch_size* critic.ppo_micro_batch_size* critic.forward_micro_batch_size* "
        f"*.log_prob_micro_batch_size* {ACTOR}.use_dynamic_bsz critic.use_dynamic_bsz "
        "*.log_prob_use_dynamic_bsz "
        "reward_model.micro_batch_size* reward_model.use_dynamic_bsz *.log_prob_max_token_len_per_gpu "
        "critic.ppo_max_token_len_per_gpu critic.forward_max_token_len_per_gpu",
        instead="sequences are packed up to --max-tokens-per-micro-batch tokens, whatever their number",
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
    Row(
        "algorithm.filter_groups.metric",
        instead="--dynamic-sampling compares rewards without the penalty of long responses",
    ),
    Row(
        "data.gen_batch_size",
        instead="a first round of --dynamic-sampling has --num-prompts, and further ones what is missing",
    ),
    Row(
        f"{ROLLOUT}.val_kwargs.*",
        instead="an evaluation decodes greedily, and samples at --temperature; megarl eval takes --top-p too",
    ),
    Row(
        "trainer.val_before_train",
        instead="with --eval-interval there is an evaluation before the first step",
    ),
    Row("trainer.val_only", instead="megarl eval @FILE evaluates only"),
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
    Row(
        f"{ROLLOUT}.multi_turn.* {ROLLOUT}.agent.*",
        instead="turns come from --env FILE.py:CLASS or --agent-command (docs/agents.md)",
    ),
    Row(
        f"{ROLLOUT}.*kwargs.* {ROLLOUT}.disable_log_stats {ROLLOUT}.cudagraph_capture_sizes",
        instead="an engine argument of vLLM: --rollout-NAME",
    ),
    Row(
        f"{ROLLOUT}.trace.*", instead="--num-rollouts-to-log N writes samples of each step to --save/rollouts"
    ),
    Row(
        f"{ACTOR}.strategy {REF}.strategy critic.strategy reward_model.strategy model_engine "
        f"*.fsdp_config.* *.fsdp_size",
        instead="Megatron trains: --use-distributed-optimizer shards Adam's state, --use-megatron-fsdp more",
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
    Row(
        "reward_model.reward_manager reward.reward_manager.*",
        instead="the built-in rules are chosen by --reward and data_source",
    ),
    Row(
        "algorithm.gdpo_reward_keys algorithm.gdpo_reward_weights",
        instead="--reward-function returns the scores by name, --score-weights NAME=WEIGHT ... weighs them",
    ),
    Row(
        "reward_model.sandbox_fusion.* reward.sandbox_fusion.*",
        instead="--reward code runs the programs of responses in a sandbox of its own",
    ),
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
    Row("data.custom_cls.* data.datagen.*", instead="prepare the rows as a file instead"),
    Row(
        "data.sampler.*",
        instead="--curriculum orders the rows by difficulty; for another order write the files in it, with "
        "--no-shuffle",
    ),
    Row("data.apply_chat_template_kwargs.*", instead="the tokenizer's template is used as it is"),
    Row(
        "actor_rollout_ref.hybrid_engine",
        instead="roles share ranks unless --actor-ranks and the like say otherwise",
    ),
    Row(
        "trainer.default_hdfs_dir trainer.del_local_ckpt_after_load trainer.device "
        "trainer.use_legacy_worker_impl",
        instead="nothing to set",
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
        "trainer.ray_wait_register_center_timeout ray_init.* ray_kwargs.*",
        instead="--executor ray starts the ranks in a Ray cluster, --ray-address names it (docs/clusters.md)",
    ),
    Row(
        "trainer.esi_redundant_time",
        instead="--exit-grace-s is the time for a last checkpoint after SIGTERM",
    ),
    Row(
        "*.checkpoint.* trainer.rollout_data_dir trainer.validation_data_dir",
        instead="--save holds checkpoints/, rollouts/ and hf/",
    ),
    Row(
        "actor_rollout_ref.nccl_timeout critic.nccl_timeout reward_model.nccl_timeout",
        instead="a timeout of single collectives; --call-timeout-s is of whole calls, such as a rollout",
    ),
    Row(
        "*profiler.* trainer.profile_steps",
        instead="--profile torch --profile-step-start N (docs/profiling.md)",
    ),
    Row(
        "*.ulysses_sequence_parallel_size",
        instead="--context-parallel-size sets all roles, --reference-context-parallel-size and "
        "--critic-context-parallel-size one",
    ),
    Row("*.optim.total_training_steps", instead="--lr-decay-iters ends the decay, else --train-iters"),
    Row(
        "reward_model.* reward.reward_model.*",
        instead="--reward-model FOLDER ...; --reward-model-backend judge asks a language model for a score, "
        "--reward-ranks gives the models ranks of their own",
    ),
    Row("critic.enable", instead="--algorithm ppo and ppo-lagrangian have a critic, the others none"),
    Row(
        "algorithm.use_pf_ppo algorithm.pf_ppo.* algorithm.rollout_correction.* "
        "*.entropy_from_logits_with_chunking *.entropy_checkpointing "
        f"{ROLLOUT}.over_sample_rate {ROLLOUT}.skip_* {ROLLOUT}.prometheus.* "
        "critic.rollout_n critic.loss_agg_mode critic.model.* critic.optim.* *.optim.num_cycles *._target_ "
        f"{REF}.* {ACTOR}.optim.optimizer {MODEL}.lora.* {MODEL}.mtp.*",
        instead="no counterpart",
    ),
)
"""Rows of the table in verl.py, after all that have a flag: their patterns match more."""
