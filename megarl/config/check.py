"""Rules across fields: what one flag, the model's shape and the number of ranks mean for each other. Runs
before any device is touched; every rule that is broken is reported at once, each as `flag (value): rule. Try
...`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.config.check_actors import actors_findings, idle_findings, of_all_actors
from megarl.config.check_checkpoints import checkpoint_findings
from megarl.config.check_experts import expert_findings
from megarl.config.check_lora import lora_findings
from megarl.config.check_offload import offload_findings
from megarl.config.check_parallel import (
    MegatronRole,
    agreed_fields,
    divisors,
    parallel_findings,
    split_sizes,
    try_,
)
from megarl.config.check_paths import path_findings
from megarl.config.check_rewards import reward_findings
from megarl.config.check_sharding import sharding_findings
from megarl.config.errors import ConfigError, raise_findings
from megarl.config.flags import ROLES
from megarl.config.hf_config import ModelShape
from megarl.config.installed import apex_finding, megatron_finding, tracker_findings
from megarl.config.mesh import engine_mode, parallel_of
from megarl.config.placement import place
from megarl.config.reward_models import reward_models, uses_rule_reward, value_model_shape
from megarl.config.schema import TrainConfig

__all__ = ["check", "check_job", "job_findings", "raise_findings"]


@dataclass(frozen=True, slots=True)
class _Job:
    """What the rules look at. `shape` is None if config.json could not be used, ranks are None if their flag
    is wrong."""

    config: TrainConfig
    shape: ModelShape | None
    critic_shape: ModelShape | None
    world_size: int
    ranks: dict[str, tuple[int, ...] | None]

    @property
    def uses_rollout(self) -> bool:
        return self.config.algorithm.needs_rollout

    @property
    def data_parallel_size(self) -> int | None:
        actor, ranks = self.config.actor, self.ranks["actor"]
        replica = (
            actor.tensor_model_parallel_size
            * actor.context_parallel_size
            * actor.pipeline_model_parallel_size
        )
        return len(ranks) // replica if ranks and len(ranks) % replica == 0 else None

    def megatron_roles(self) -> Iterator[MegatronRole]:
        present = [role for role in ROLES if getattr(self.config, role) is not None]
        shared = agreed_fields(self.config, present)
        of_model = self.reward_shapes()
        for role, ranks in self.ranks.items():
            section = role.partition("_model")[0]
            if section in present and (section != "reward" or role in of_model):
                shape = {"critic": self.critic_shape, "reward": of_model.get(role)}.get(section, self.shape)
                yield MegatronRole(section, parallel_of(self.config, role), ranks, shape, shared)

    def reward_shapes(self) -> dict[str, ModelShape]:
        """Of the reward models that Megatron runs; none if something is wrong with any, which
        `reward_findings` says."""
        try:
            return {
                model.name: value_model_shape(model.path)
                for model in reward_models(self.config)
                if model.backend == "megatron"
            }
        except ValueError:
            return {}


def check(
    config: TrainConfig,
    shape: ModelShape | None,
    world_size: int,
    new_run: bool = True,
    critic_shape: ModelShape | None = None,
) -> list[str]:
    """All rules that one actor with its roles breaks; [] if none.

    Args:
        shape: of config.model.model. None leaves the rules about it out, for when config.json itself is
            wrong.
        world_size: ranks of the job.
        new_run: --save is going to be written, so it must not hold a run. False: the model is only evaluated.
        critic_shape: of the critic's model, with its value head. Default: `shape`.
    """
    job, findings = _job(config, shape, critic_shape, world_size)
    rules = [
        _placement,
        _megatron,
        _experts,
        _fp8,
        _batch,
        _optimizer,
        _lora,
        _held_out,
        _offload,
        _sharding,
        _critic,
    ]
    rules += [*([_sequence_length] if shape else []), *([] if new_run else [_evaluation])]
    if job.uses_rollout:
        rules += [_rollout_placement, _sampling, _algorithm, *([_rollout_shape] if shape else [])]
    findings += [finding for rule in rules for finding in rule(job)]
    return [
        *filter(None, [megatron_finding(), apex_finding()]),
        *findings,
        *reward_findings(config),
        *tracker_findings(config.run.log_with),
        *path_findings(config, new_run),
    ]


def check_layout(config: TrainConfig, world_size: int) -> None:
    """The rules about ranks, parallel sizes and the model's shape alone: no weights, data or run folder need
    exist.

    Raises: ConfigError with all findings."""

    def findings_of(of_actor: TrainConfig) -> list[str]:
        shape, critic_shape, findings = _load_shapes(of_actor)
        if findings:
            return findings
        job, findings = _job(of_actor, shape, critic_shape, world_size)
        rules = [_placement, _megatron, *([_rollout_placement, _rollout_shape] if job.uses_rollout else [])]
        return findings + [finding for rule in rules for finding in rule(job)]

    raise_findings(of_all_actors(config, findings_of) + actors_findings(config, world_size))


def _job(
    config: TrainConfig, shape: ModelShape | None, critic_shape: ModelShape | None, world_size: int
) -> tuple[_Job, list[str]]:
    """What the rules look at, and what is wrong with the lists of ranks."""
    ranks, findings = place(config, world_size)
    return _Job(config, shape, critic_shape or shape, world_size, ranks), findings


def check_job(config: TrainConfig, world_size: int, new_run: bool = True) -> ModelShape:
    """Raises: ConfigError with `job_findings`. Returns the first actor's shape."""
    raise_findings(job_findings(config, world_size, new_run))
    return ModelShape.load(config.model.model)


def job_findings(config: TrainConfig, world_size: int, new_run: bool = True) -> list[str]:
    """All findings of `check` for every actor, together with what is wrong in the models' config.json; if
    nothing is, what is wrong with --load."""

    def findings_of(of_actor: TrainConfig) -> list[str]:
        shape, critic_shape, findings = _load_shapes(of_actor)
        return findings + check(of_actor, shape, world_size, new_run, critic_shape)

    findings = of_all_actors(config, findings_of) + actors_findings(config, world_size, new_run)
    return findings or (list(checkpoint_findings(config)) if new_run else [])


def _load_shapes(config: TrainConfig) -> tuple[ModelShape | None, ModelShape | None, list[str]]:
    """Of the actor and of the critic, None if there is none, and what is wrong in their config.json."""
    shape, findings = _load_shape(config.model.model)
    if config.critic is None:
        return shape, None, findings
    critic_shape, of_critic = _load_shape(config.model.critic_model or config.model.model, value_head=True)
    # of one folder the actor's findings say it
    of_critic = (
        [finding.replace("--model ", "--critic-model ", 1) for finding in of_critic]
        if config.model.critic_model
        else []
    )
    return shape, critic_shape, findings + of_critic


def _load_shape(folder: str, value_head: bool = False) -> tuple[ModelShape | None, list[str]]:
    try:
        return ModelShape.load(folder, value_head=value_head), []
    except ConfigError as error:
        return None, list(error.findings)


def _placement(job: _Job) -> Iterator[str]:
    placement = job.config.placement
    if placement.executor == "inline" and (job.world_size, placement.nproc_per_node) != (1, 1):
        yield (
            "--executor (inline): has one rank, not "
            f"{max(job.world_size, placement.nproc_per_node)}. Try --nproc-per-node 1."
        )
    if placement.num_actors == 1:
        yield from idle_findings(job.ranks, job.world_size)


def _megatron(job: _Job) -> Iterator[str]:
    yield from dict.fromkeys(finding for role in job.megatron_roles() for finding in parallel_findings(role))


def _experts(job: _Job) -> Iterator[str]:
    trained = [job.shape, *([job.critic_shape] if job.config.critic is not None else [])]
    yield from expert_findings(job.config, [shape for shape in trained if shape is not None])


def _fp8(job: _Job) -> Iterator[str]:
    """That it needs a GPU and Transformer Engine is said where the model is built: the driver may have
    neither."""
    fp8 = job.config.transformer.get("fp8")
    if fp8 is None:
        return
    if not job.config.model.bf16:
        yield f"--fp8 ({fp8}): its weights are kept in bf16. Add --bf16."
    if job.shape is not None and job.shape.is_moe:
        yield (
            f"--fp8 ({fp8}): is not supported for a mixture of experts, whose experts get any "
            "number of tokens. Leave it out."
        )


def _algorithm(job: _Job) -> Iterator[str]:
    warmup, steps = job.config.algorithm.critic_warmup_iters, job.config.batch.train_iters
    if warmup >= steps:
        yield (
            f"--critic-warmup-iters ({warmup}): must be below --train-iters ({steps}), or the "
            f"policy never learns. Try {steps // 10}."
        )
    yield from job.config.algorithm.step_findings(
        job.config.batch.num_prompts * job.config.batch.num_samples_per_prompt
    )


def _critic(job: _Job) -> Iterator[str]:
    """The critic reads the actor's token ids."""
    if (
        job.shape is not None
        and job.critic_shape is not None
        and job.critic_shape.vocab_size != job.shape.vocab_size
    ):
        yield (
            f"--critic-model ({job.config.model.critic_model}): has {job.critic_shape.vocab_size} "
            "words, and --model has "
            f"{job.shape.vocab_size}; it must read the same tokens. Name a model of the same "
            "family, or leave it out."
        )
    sampling = job.config.sampling
    longest = sampling.max_prompt_length + sampling.max_response_length
    if (
        job.config.model.critic_model
        and job.critic_shape is not None
        and longest > job.critic_shape.max_position_embeddings
    ):
        yield (
            f"--critic-model ({job.config.model.critic_model}): takes "
            f"{job.critic_shape.max_position_embeddings} tokens "
            "(max_position_embeddings), and --max-prompt-length + --max-response-length = "
            f"{longest}. Make them shorter."
        )


def _batch(job: _Job) -> Iterator[str]:
    batch, dp = job.config.batch, job.data_parallel_size
    size, samples = batch.global_batch_size, batch.num_prompts * batch.num_samples_per_prompt
    fits = (
        [n for n in divisors(samples) if dp and n % dp == 0]
        if job.uses_rollout
        else [size - size % dp or dp, size - size % dp + dp]
        if dp
        else []
    )
    advice = try_(fits, size)
    if dp and not fits:
        num_prompts = -(-batch.num_prompts // dp) * dp
        advice = (
            f" Try --num-prompts {num_prompts} --global-batch-size "
            f"{num_prompts * batch.num_samples_per_prompt}."
        )
    if job.uses_rollout and samples % size:
        yield (
            f"--global-batch-size ({size}): must divide num_prompts ({batch.num_prompts}) x "
            "num_samples_per_prompt "
            f"({batch.num_samples_per_prompt}) = {samples}.{advice}"
        )
    if dp and size % dp:
        yield (
            f"--global-batch-size ({size}): must be a multiple of the actor's data-parallel size "
            f"({dp}).{advice}"
        )


def _optimizer(job: _Job) -> Iterator[str]:
    actor, critic = job.config.optimizer, job.config.critic_optimizer
    for prefix, optimizer in (
        [("", actor)] if critic in (None, actor) else [("actor-", actor), ("critic-", critic)]
    ):
        if optimizer.min_lr > optimizer.lr:
            yield (
                f"--{prefix}min-lr ({optimizer.min_lr:g}): must be at most --{prefix}lr "
                f"({optimizer.lr:g}). Try {optimizer.lr / 10:g}."
            )
        if optimizer.lr_decay_iters is not None and optimizer.lr_decay_iters <= optimizer.lr_warmup_iters:
            yield (
                f"--{prefix}lr-decay-iters ({optimizer.lr_decay_iters}): must be above "
                f"--{prefix}lr-warmup-iters "
                f"({optimizer.lr_warmup_iters}). Try {optimizer.lr_warmup_iters + 1}."
            )


def _lora(job: _Job) -> Iterator[str]:
    yield from dict.fromkeys(lora_findings(job.config, {"actor": job.shape, "critic": job.critic_shape}))


def _offload(job: _Job) -> Iterator[str]:
    engine = engine_mode(job.config, job.world_size) if job.uses_rollout and all(job.ranks.values()) else None
    yield from dict.fromkeys(offload_findings(job.config, list(job.megatron_roles()), engine))


def _sharding(job: _Job) -> Iterator[str]:
    yield from dict.fromkeys(sharding_findings(job.config, list(job.megatron_roles())))


def _held_out(job: _Job) -> Iterator[str]:
    """Evaluation during training."""
    interval = job.config.run.eval_interval
    if interval and job.uses_rollout and not uses_rule_reward(job.config):
        yield (
            f"--eval-interval ({interval}): held-out answers are scored by a rule, and with "
            "--reward-model there is none. Add "
            "--reward auto, which then counts in training too, or leave it out."
        )
    if interval and not job.config.data.eval_data:
        yield f"--eval-interval ({interval}): needs --eval-data. Leave it out, or name held-out files."


def _evaluation(job: _Job) -> Iterator[str]:
    """Of `megarl eval`."""
    if (
        job.uses_rollout and not uses_rule_reward(job.config) and not job.config.run.eval_interval
    ):  # else _held_out says it
        yield (
            "--reward-model: held-out answers are scored by a rule, and with it there is none. "
            "Add --reward auto."
        )
    if not job.config.data.eval_data:
        yield "--eval-data: an evaluation needs held-out rows. Give one or more *.jsonl or *.parquet files."
    if not job.uses_rollout:
        yield "--algorithm (sft): an evaluation samples answers and scores them. Try --algorithm grpo."


def _rollout_shape(job: _Job) -> Iterator[str]:
    tp, groups, sizes = (
        job.config.rollout.tensor_parallel_size,
        job.shape.num_query_groups,
        split_sizes(job.shape),
    )
    sizes |= {"moe_intermediate_size": job.shape.moe_ffn_hidden_size} if job.shape.is_moe else {}
    fits = [
        n
        for n in divisors(job.shape.num_attention_heads)
        if not any(size % n for size in sizes.values()) and (groups % n == 0 or n % groups == 0)
    ]
    for name, size in sizes.items():
        if size % tp:
            yield (
                f"--rollout-tensor-parallel-size ({tp}): must divide the model's {name} "
                f"({size}).{try_(fits, tp)}"
            )
    if groups % tp and tp % groups:
        yield (
            f"--rollout-tensor-parallel-size ({tp}): must divide the model's key-value heads "
            f"({groups}), or be a multiple.{try_(fits, tp)}"
        )


def _sequence_length(job: _Job) -> Iterator[str]:
    sampling, limit = job.config.sampling, job.shape.max_position_embeddings
    total = sampling.max_prompt_length + sampling.max_response_length
    if total > limit:
        rest = limit - sampling.max_prompt_length
        advice = f"Try --max-response-length {rest}." if rest > 0 else "Make both shorter."
        yield (
            f"--max-prompt-length ({sampling.max_prompt_length}) + --max-response-length "
            f"({sampling.max_response_length}) = {total}: "
            f"must be at most the model's max_position_embeddings ({limit}). {advice}"
        )


def _rollout_placement(job: _Job) -> Iterator[str]:
    tp, rollout = job.config.rollout.tensor_parallel_size, job.ranks["rollout"]
    if rollout and len(rollout) % tp:
        yield (
            f"--rollout-tensor-parallel-size ({tp}): must divide the ranks of the rollout engines "
            f"({len(rollout)})."
            f"{try_(divisors(len(rollout)), tp)}"
        )
    if rollout and job.config.placement.rollout_engine == "in-process" and len(rollout) < job.world_size:
        yield (
            f"--rollout-engine (in-process): needs engines on all {job.world_size} ranks, and "
            "--rollout-ranks is "
            f"{job.config.placement.rollout_ranks}. Leave --rollout-ranks out, or try "
            "--rollout-engine out-of-process."
        )
    if (
        rollout
        and job.config.reshard.reshard_double_buffer
        and engine_mode(job.config, job.world_size) == "in-process"
    ):
        yield (
            "--reshard-double-buffer: an in-process engine has one buffer. Leave it out, or try "
            "--rollout-engine out-of-process."
        )


def _sampling(job: _Job) -> Iterator[str]:
    sampling = job.config.sampling
    if sampling.temperature == 0:
        yield "--temperature (0): must be above 0, as greedy samples of one prompt are all alike. Try 1.0."
    if sampling.top_p != 1:
        yield (
            f"--top-p ({sampling.top_p:g}): must be 1 in training: the engine would draw from a "
            "truncated distribution, whose "
            "log-probs are not the policy's. Leave it out."
        )
    if sampling.top_k != 0:
        yield (
            f"--top-k ({sampling.top_k}): must be 0 (off) in training: the engine would draw from a "
            "truncated distribution, whose "
            "log-probs are not the policy's. Leave it out."
        )
