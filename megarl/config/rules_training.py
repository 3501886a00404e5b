"""Check flags of training, sampling and memory against each other and against the model's shape.

Each rule is a function of the job, named by its subject, and yields an error per wrong flag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from megarl.config.errors import Errors, divisors, try_numbers
from megarl.config.flags import algorithm_name, refuse_set
from megarl.config.hf_config import ModelShape
from megarl.config.reward_models import reward_models, uses_rule_reward
from megarl.config.role_sections import LORA_TARGETS
from megarl.config.rules_layout import Job, MegatronRole
from megarl.config.schema import LoRAConfig
from megarl.files.checkpoints import run_of_model
from megarl.metrics import current_name

NO_EVAL_DATA = "--eval-data: an evaluation needs held-out rows. Give one or more *.jsonl or *.parquet files."
_UNPROVEN_SHARDING = {
    "optim_grads_params": (
        "the weights are shards between two passes, and no weight sync, export or checkpoint reads these"
    ),
    "no_shard": "shards nothing, as without --use-megatron-fsdp",
}


def batch(job: Job) -> Errors:
    """Yield an error if --global-batch-size does not divide the samples of a step, or data-parallel ranks
    cannot share it equally."""
    sizes, dp = job.config.batch, job.data_parallel_size
    size, samples = sizes.global_batch_size, sizes.num_prompts * sizes.num_samples_per_prompt
    fits = []
    if dp and job.uses_rollout:
        fits = [n for n in divisors(samples) if n % dp == 0]
    elif dp:
        fits = [size - size % dp or dp, size - size % dp + dp]
    advice = try_numbers(fits, size)
    if dp and not fits:
        num_prompts = -(-sizes.num_prompts // dp) * dp
        total = num_prompts * sizes.num_samples_per_prompt
        advice = f" Try --num-prompts {num_prompts} --global-batch-size {total}."
    if job.uses_rollout and samples % size:
        yield (
            f"--global-batch-size ({size}): must divide num_prompts ({sizes.num_prompts}) x "
            f"num_samples_per_prompt ({sizes.num_samples_per_prompt}) = {samples}.{advice}"
        )
    if dp and size % dp:
        yield (
            f"--global-batch-size ({size}): must be a multiple of the actor's data-parallel size "
            f"({dp}).{advice}"
        )


def optimizer(job: Job) -> Errors:
    """Yield an error per contradiction in the schedule of the learning rate, e.g. --min-lr above --lr."""
    for role in job.trained_roles:
        values, flag = role.optimizer, role.flag
        if values.lr_decay_style == "constant":  # min_lr and lr_decay_iters have no effect
            continue
        if values.min_lr > values.lr:
            yield (
                f"{flag('min_lr')} ({values.min_lr:g}): must be at most {flag('lr')} ({values.lr:g}). "
                f"Try {values.lr / 10:g}."
            )
        if values.lr_decay_iters is not None and values.lr_decay_iters <= values.lr_warmup_iters:
            yield (
                f"{flag('lr_decay_iters')} ({values.lr_decay_iters}): must be above "
                f"{flag('lr_warmup_iters')} ({values.lr_warmup_iters}). Try {values.lr_warmup_iters + 1}."
            )


def critic(job: Job) -> Errors:
    """Yield an error for a critic's model with another vocabulary than the actor's, or with too few positions
    for a sample."""
    shape, name = job.critic_shape, job.config.model.critic_model
    if shape is None:
        return
    if job.shape is not None and shape.vocab_size != job.shape.vocab_size:
        yield (
            f"--critic-model ({name}): has a vocabulary of {shape.vocab_size}, and --model of "
            f"{job.shape.vocab_size}; they must be the same. Name a model of the same family, or leave it "
            "out."
        )
    longest = job.config.sampling.max_length
    if name and longest > shape.max_position_embeddings:
        yield (
            f"--critic-model ({name}): takes {shape.max_position_embeddings} tokens "
            f"(max_position_embeddings), and --max-prompt-length + --max-response-length = {longest}. Make "
            "them shorter."
        )


def fp8(job: Job) -> Errors:
    """Yield an error per setting that --fp8 does not support: weights in fp32, a mixture of experts.

    The ranks check that there is a GPU and Transformer Engine. The driver's machine may have neither."""
    value = job.config.transformer.get("fp8")
    if value is not None and not job.config.model.bf16:
        yield f"--fp8 ({value}): needs weights in bf16. Add --bf16."
    if value is not None and job.shape is not None and job.shape.is_moe:
        yield (
            f"--fp8 ({value}): is not supported for a mixture of experts, whose experts get any number of "
            "tokens. Leave it out."
        )


def experts_of_dense_model(job: Job) -> Errors:
    """Yield an error per flag about experts that is set, if neither actor nor critic has experts."""
    shapes = [job.shape] if job.config.critic is None else [job.shape, job.critic_shape]
    shapes = [shape for shape in shapes if shape is not None]
    if not shapes or any(shape.is_moe for shape in shapes):
        return
    reason = f"needs a mixture of experts, and {shapes[0].model_type} is none. Leave it out."
    yield from refuse_set(job.config.experts, reason)


def expert_balance(job: Job) -> Errors:
    """Yield an error for a balancing loss of experts without its factor, or a factor without its loss."""
    experts = job.config.experts
    kind, coeff = experts.moe_router_load_balancing_type, experts.moe_aux_loss_coeff
    if kind == "none" and coeff:
        yield (
            f"--moe-aux-loss-coeff ({coeff:g}): has no effect without --moe-router-load-balancing-type. "
            "Leave it out, or try --moe-router-load-balancing-type seq_aux_loss."
        )
    if kind != "none" and not coeff:
        yield (
            f"--moe-router-load-balancing-type ({kind}): has no effect with --moe-aux-loss-coeff 0. Try "
            "--moe-aux-loss-coeff 1e-3."
        )


def routing_replay(job: Job) -> Errors:
    """Yield an error for --moe-routing-replay if nothing records the routing of experts."""
    source = job.config.experts.moe_routing_replay
    if source == "engine" and not job.config.rollout.enable_prefix_caching:
        yield (
            "--moe-routing-replay (engine): vLLM reports the experts that it chose only with its prefix "
            "cache. Leave --no-rollout-enable-prefix-caching out, or try --moe-routing-replay policy."
        )
    if source != "none" and not job.uses_rollout:
        yield (
            f"--moe-routing-replay ({source}): there are no old log-probs in supervised fine-tuning. "
            "Leave it out."
        )
    is_dense = job.shape is not None and job.shape.is_dense
    if source != "none" and is_dense and job.critic_shape is not None and job.critic_shape.is_moe:
        yield (
            f"--moe-routing-replay ({source}): replays the experts of the actor, and --model "
            f"({job.shape.model_type}) has none; a critic chooses its own. Leave it out."
        )


def lora(job: Job) -> Errors:
    """Yield an error for adapters in layers that cannot have them, and per flag of adapters that is set
    without adapters."""
    for role in job.trained_roles:
        rank_flag, rank = role.flag("lora_rank"), role.lora.lora_rank
        if not rank:
            reason = f"has no effect without {rank_flag}. Leave it out, or try {rank_flag} 16."
            used = [other.lora for other in job.trained_roles if other.lora.lora_rank]
            names = [field.name for field in fields(LoRAConfig)]
            yield from _refuse_unused(role.lora, used, reason, *names, flag_of=role.flag)
        elif role.shape is not None:
            yield from _lora_targets(role.lora, role.shape, role.flag("lora_target_modules"))
        if rank and role.optimizer.optimizer_cpu_offload:
            yield (
                f"--optimizer-cpu-offload: is not tested with {rank_flag} ({rank}), whose optimizer "
                "state is small. Leave it out."
            )


def _refuse_unused(
    node: object, used: Sequence[object], reason: str, *names: str, flag_of: Callable[[str], str]
) -> Errors:
    """Yield an error with this reason for each field of a role that is set and has no effect.

    A value that has an effect in another role is passed over: the flag of all roles gave it.

    Args:
        used: the same section of the roles in which the fields have an effect."""
    of_role = [name for name in names if all(getattr(one, name) != getattr(node, name) for one in used)]
    if of_role:
        yield from refuse_set(node, reason, *of_role, flag_of=flag_of)


def _lora_targets(values: LoRAConfig, shape: ModelShape, flag: str) -> Errors:
    without = {"linear_qkv": "multi-head latent attention has no such layer"} if shape.is_mla else {}
    if shape.is_moe:
        of_experts = "in a mixture of experts it is the experts', which have no adapters"
        without |= dict.fromkeys(("linear_fc1", "linear_fc2"), of_experts)
    wrong = [target for target in values.lora_target_modules if target in without]
    fits = [target for target in values.lora_target_modules if target not in without]
    fits = fits or [target for target in LORA_TARGETS if target not in without]
    if wrong:
        reasons = "; ".join(dict.fromkeys(without[target] for target in wrong))
        yield f"{flag} ({' '.join(wrong)}): {reasons}. Try {flag} {' '.join(fits)}."


def fsdp(job: Job) -> Errors:
    """Yield an error per setting that --use-megatron-fsdp does not support, and per flag of it that is set
    without it."""
    for role in job.trained_roles:
        flag, strategy_flag = role.flag("use_megatron_fsdp"), role.flag("data_parallel_sharding_strategy")
        strategy = role.optimizer.data_parallel_sharding_strategy
        if role.optimizer.use_megatron_fsdp:
            if strategy in _UNPROVEN_SHARDING:
                yield (
                    f"{strategy_flag} ({strategy}): {_UNPROVEN_SHARDING[strategy]}. Try {strategy_flag} "
                    "optim_grads."
                )
            yield from _fsdp_with(role, flag)
        else:
            reason = f"has no effect without {flag}. Leave it out, or set that."
            used = [other.optimizer for other in job.trained_roles if other.optimizer.use_megatron_fsdp]
            yield from _refuse_unused(
                role.optimizer, used, reason, "data_parallel_sharding_strategy", flag_of=role.flag
            )


def _fsdp_with(role: MegatronRole, flag: str) -> Errors:
    for field in ("overlap_grad_reduce", "optimizer_cpu_offload"):
        if getattr(role.optimizer, field):
            yield f"{flag}: does not go with {role.flag(field)}. Leave one of the two out."
    if not role.optimizer.use_distributed_optimizer:
        yield (
            f"{flag}: needs Megatron's distributed optimizer. Leave "
            f"{role.flag('use_distributed_optimizer').replace('--', '--no-', 1)} out."
        )
    if role.lora.lora_rank:
        lora_flag = flag.replace("use-megatron-fsdp", "lora-rank")  # the flag for the same roles
        yield (
            f"{flag}: is not tested with {lora_flag} ({role.lora.lora_rank}), whose optimizer state "
            "is small. Leave it out."
        )
    for field in ("pipeline_model_parallel_size", "tensor_model_parallel_size"):
        if (size := getattr(role.parallel, field)) > 1:
            other = role.flag(field)
            yield f"{flag}: is not tested with {other} ({size}). Leave it out, or try {other} 1."
    if role.shape is not None and role.shape.is_moe:
        yield (
            f"{flag}: is not tested with a mixture of experts, which {role.shape.model_type} is. "
            "Leave it out."
        )
    if role.parallel.offload:
        yield (
            f"{flag}: its buffers stay where they are, and {role.flag('offload')} "
            f"({' '.join(role.parallel.offload)}) would move them. Leave one of the two out."
        )


def offload(job: Job) -> Errors:
    """Yield an error for --offload of parts that a role does not have, or an engine reads on the device."""
    config = job.config
    for role in job.megatron_roles:
        flag, parts = role.flag("offload"), role.parallel.offload
        once = tuple(dict.fromkeys(parts))
        if once != parts:
            yield f"{flag} ({' '.join(parts)}): names a part twice. Try {flag} {' '.join(once)}."
        surplus = [part for part in parts if part != "parameters"]
        # a value that a trained role has too comes from the flag of all roles, and is for trained roles
        is_own = all(parts != other.parallel.offload for other in job.trained_roles)
        if role.optimizer is None and surplus and is_own:
            yield (
                f"{flag} ({' '.join(parts)}): the {role.name} is frozen, it has no "
                f"{' and no '.join(surplus)}. Try {flag} parameters."
            )
    yield from _offload_of_other_reward_models(job)
    of_roles = [role.parallel.offload for role in job.megatron_roles]
    if not any([*of_roles, config.reward and config.reward.offload]):
        reason = "has no effect without --offload. Leave it out, or set that."
        yield from refuse_set(config.placement, reason, "offload_ahead_bytes")
    if "parameters" in config.actor.offload:
        yield from _offload_beside_engine(job, job.megatron_roles[0].flag("offload"))


def _offload_of_other_reward_models(job: Job) -> Errors:
    """Yield an error for --reward-offload of parts that cannot be moved, if Megatron runs none of the reward
    models."""
    parts = () if job.config.reward is None else job.config.reward.offload
    has_megatron = any(role.name == "reward" for role in job.megatron_roles)
    if not parts or has_megatron or parts == job.config.actor.offload:
        return
    try:
        backends = {model.backend for model in reward_models(job.config)}
    except ValueError:  # another rule reports it
        return
    given = f"--reward-offload ({' '.join(parts)})"
    if backends == {"judge"}:
        yield f"{given}: a judge runs in processes of vLLM's own, whose memory stays. Leave it out."
    elif surplus := [part for part in parts if part != "parameters"]:
        yield (
            f"{given}: the reward is frozen, it has no {' and no '.join(surplus)}. Try --reward-offload "
            "parameters."
        )


def _offload_beside_engine(job: Job, flag: str) -> Errors:
    """Yield an error if the actor's weights are offloaded and an engine reads them in place."""
    reshard = job.config.reshard
    if job.engine == "in-process" and reshard.reshard_alias:
        yield (
            f"{flag} (parameters): the engine generates with the actor's own memory where it can "
            "(--reshard-alias), which must stay. Try --no-reshard-alias, or leave parameters out."
        )
    if job.engine == "out-of-process":
        reader = "an engine in another process"
    elif job.engine == "in-process" and _engine_reads_other_ranks(job):
        reader = "an engine that is split otherwise than the actor reads other ranks' weights, and"
    else:
        return
    if reshard.reshard_transport in ("auto", "cuda-ipc"):
        yield (
            f"{flag} (parameters): {reader} keeps the memory that it reads by CUDA IPC "
            f"(--reshard-transport {reshard.reshard_transport}), so nothing would become free. Try "
            "--reshard-transport messages, or leave parameters out."
        )


def _engine_reads_other_ranks(job: Job) -> bool:
    """Return whether an in-process engine needs weights that the actor holds on other ranks only."""
    actor, tp = job.megatron_roles[0], job.config.rollout.tensor_parallel_size
    is_split = actor.pp > 1 or actor.tp not in (1, tp)
    if actor.shape is not None and actor.shape.is_moe:
        expert_tp = actor.parallel.expert_tensor_parallel_size or actor.tp
        is_split |= actor.parallel.expert_model_parallel_size > 1 or expert_tp not in (1, tp)
    ranks_per_node = min(job.world_size, job.config.placement.nproc_per_node)  # IPC works within a node
    return ranks_per_node > 1 and (is_split or len(actor.ranks) < job.world_size)


def hybrid_optimizer(job: Job) -> Errors:
    """Yield an error per setting that Megatron does not support with --optimizer-cpu-offload, and per flag of
    it that is set without it."""
    for role in job.trained_roles:
        flag, values = role.flag("optimizer_cpu_offload"), role.optimizer
        if not values.optimizer_cpu_offload:
            reason = f"has no effect without {flag}. Leave it out, or set that."
            used = [other.optimizer for other in job.trained_roles if other.optimizer.optimizer_cpu_offload]
            yield from _refuse_unused(values, used, reason, "optimizer_offload_fraction", flag_of=role.flag)
            continue
        if not values.use_distributed_optimizer:
            yield (f"{flag}: needs {role.flag('use_distributed_optimizer')}. Leave one of the two flags out.")
        if "optimizer" in role.parallel.offload:
            yield (
                f"{flag}: the optimizer state is always in host memory, so {role.flag('offload')} "
                "(optimizer) has nothing to move. Leave one of the two out."
            )


def sequence_length(job: Job) -> Errors:
    """Yield an error if samples can be longer than the model's max_position_embeddings."""
    if job.shape is None:
        return
    sampling, limit = job.config.sampling, job.shape.max_position_embeddings
    flag = "max-response-length"
    if sampling.max_engine_length > sampling.max_length:
        sampling, flag = sampling.of("eval"), "eval-max-response-length"
    total = sampling.max_length
    if total > limit:
        if sampling.max_context_length is not None:
            yield (
                f"--max-context-length ({total}): must be at most the model's max_position_embeddings "
                f"({limit}). Try {limit}."
            )
            return
        rest = limit - sampling.max_prompt_length
        advice = f"Try --{flag} {rest}." if rest > 0 else "Make both shorter."
        yield (
            f"--max-prompt-length ({sampling.max_prompt_length}) + --{flag} "
            f"({sampling.max_response_length}) = {total}: must be at most the model's "
            f"max_position_embeddings ({limit}). {advice}"
        )


def sampling(job: Job) -> Errors:
    """Yield an error per flag that makes engines sample from another distribution than the policy's."""
    values = job.config.sampling
    if values.temperature == 0:
        yield "--temperature (0): must be above 0, as greedy samples of one prompt are all alike. Try 1.0."
    truncated = (
        "in training: the engine would draw from a truncated distribution, whose log-probs are not the "
        "policy's. Leave it out."
    )
    if values.top_p != 1:
        yield f"--top-p ({values.top_p:g}): must be 1 {truncated}"
    if values.top_k != 0:
        yield f"--top-k ({values.top_k}): must be 0 (off) {truncated}"


def algorithm(job: Job) -> Errors:
    """Yield an error per flag of the algorithm that does not fit the number of steps or of their samples."""
    chosen, sizes = job.config.algorithm, job.config.batch
    if chosen.critic_warmup_iters >= sizes.train_iters:
        yield (
            f"--critic-warmup-iters ({chosen.critic_warmup_iters}): must be below --train-iters "
            f"({sizes.train_iters}), or the policy never learns. Try {sizes.train_iters // 10}."
        )
    yield from chosen.step_errors(sizes.num_prompts * sizes.num_samples_per_prompt)


def evaluation_in_training(job: Job) -> Errors:
    """Yield an error for --eval-interval without held-out data, or without a rule that scores it."""
    interval = job.config.run.eval_interval
    if interval and job.uses_rollout and not uses_rule_reward(job.config):
        yield (
            f"--eval-interval ({interval}): held-out answers are scored by a rule, and with --reward-model "
            "there is none. Add --reward auto, which then counts in training too, or leave it out."
        )
    if interval and not job.config.data.eval_data:
        yield f"--eval-interval ({interval}): needs --eval-data. Leave it out, or name held-out files."
    metric = job.config.checkpoint.best_metric or ""
    if (new := current_name(metric)) != metric:
        yield f"--best-metric ({metric}): has another name now. Try --best-metric {new}."


def _no_evaluation_of(run: Path) -> str:
    return (
        f" The run {run} has no evaluation to repeat; give the args file of a job that has one: "
        f"megarl eval @job.args --model {run}."
    )


def evaluation_alone(job: Job) -> Errors:
    """Yield an error if `megarl eval` has no held-out data, no rule that scores it, or nothing that samples."""
    config = job.config
    if job.uses_rollout and not uses_rule_reward(config):
        yield (
            "--reward-model: held-out answers are scored by a rule, and with it there is none. "
            "Add --reward auto."
        )
    if not config.data.eval_data:
        run = run_of_model(Path(config.model.model))
        yield NO_EVAL_DATA + ("" if run is None else _no_evaluation_of(run))
    if not job.uses_rollout:
        name = algorithm_name(type(config.algorithm))
        yield f"--algorithm ({name}): an evaluation samples answers and scores them. Try --algorithm grpo."
    if (num_samples := config.run.eval_num_samples) > 1 and not config.sampling.of("eval").temperature:
        yield (
            f"--eval-num-samples ({num_samples}): at --temperature 0 all samples of a prompt are alike. Try "
            "--eval-num-samples 1, or --temperature 1.0."
        )
