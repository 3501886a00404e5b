"""Rules across fields: what one flag, the model's shape and the number of ranks mean for each other. Runs before any device is
touched; every rule that is broken is reported at once, each as `flag (value): rule. Try ...`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megarl.config.check_paths import path_findings
from megarl.config.check_rewards import reward_findings
from megarl.config.errors import ConfigError, raise_findings
from megarl.config.flags import ROLES, flag_name
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import engine_mode
from megarl.config.placement import parse_ranks
from megarl.config.schema import ParallelConfig, TrainConfig

__all__ = ["check", "check_job", "raise_findings"]


@dataclass(frozen=True, slots=True)
class _Job:
    """What the rules look at. `shape` is None if config.json could not be used, ranks are None if their flag is wrong."""

    config: TrainConfig
    shape: ModelShape | None
    world_size: int
    ranks: dict[str, tuple[int, ...] | None]

    @property
    def uses_rollout(self) -> bool:
        return self.config.algorithm.needs_rollout

    @property
    def data_parallel_size(self) -> int | None:
        actor, ranks = self.config.actor, self.ranks["actor"]
        model_parallel_size = actor.tensor_model_parallel_size * actor.pipeline_model_parallel_size
        return len(ranks) // model_parallel_size if ranks and len(ranks) % model_parallel_size == 0 else None


def check(config: TrainConfig, shape: ModelShape | None, world_size: int, new_run: bool = True) -> list[str]:
    """All rules that the job breaks; [] if none.

    Args:
        shape: of config.model.model. None leaves the rules about it out, for when config.json itself is wrong.
        world_size: ranks of the job.
        new_run: --save is going to be written, so it must not hold a run. False: the model is only evaluated.
    """
    job, findings = _job(config, shape, world_size)
    rules = [_placement, _mesh, _batch, _optimizer, *([_actor_shape, _sequence_length] if shape else []), *([] if new_run else [_evaluation])]
    if job.uses_rollout:
        rules += [_rollout_placement, _sampling, *([_rollout_shape] if shape else [])]
    findings += [finding for rule in rules for finding in rule(job)]
    return [*findings, *reward_findings(config), *path_findings(config, new_run)]


def check_layout(config: TrainConfig, world_size: int) -> ModelShape:
    """The rules about ranks, parallel sizes and the model's shape alone: no weights, data or run folder need exist.

    Raises: ConfigError with all findings. Returns the model's shape."""
    shape = ModelShape.load(config.model.model)
    job, findings = _job(config, shape, world_size)
    rules = [_placement, _mesh, _actor_shape, *([_rollout_placement, _rollout_shape] if job.uses_rollout else [])]
    raise_findings(findings + [finding for rule in rules for finding in rule(job)])
    return shape


def _job(config: TrainConfig, shape: ModelShape | None, world_size: int) -> tuple[_Job, list[str]]:
    """What the rules look at, and what is wrong with the lists of ranks."""
    ranks, findings = {}, []
    for role, text in (("actor", config.placement.actor_ranks), ("rollout", config.placement.rollout_ranks)):
        try:
            ranks[role] = parse_ranks(text, world_size) if text is not None else tuple(range(world_size))
        except ValueError as error:
            ranks[role] = None
            findings.append(f"--{role}-{error}")
    return _Job(config, shape, world_size, ranks), findings


def check_job(config: TrainConfig, world_size: int, new_run: bool = True) -> ModelShape:
    """Raises: ConfigError with all findings of `check`, together with what is wrong in the model's config.json. Returns its shape."""
    shape, findings = None, []
    try:
        shape = ModelShape.load(config.model.model)
    except ConfigError as error:
        findings = list(error.findings)
    raise_findings(findings + check(config, shape, world_size, new_run))
    return shape


def data_parallel_size(config: TrainConfig, world_size: int) -> int:
    """Of the actor, in a configuration that `check` accepts."""
    ranks = parse_ranks(config.placement.actor_ranks, world_size) if config.placement.actor_ranks else range(world_size)
    return len(ranks) // (config.actor.tensor_model_parallel_size * config.actor.pipeline_model_parallel_size)


def _placement(job: _Job) -> Iterator[str]:
    placement = job.config.placement
    if placement.executor == "inline" and (job.world_size, placement.nproc_per_node) != (1, 1):
        yield f"--executor (inline): has one rank, not {max(job.world_size, placement.nproc_per_node)}. Try --nproc-per-node 1."
    roles = ["actor", *(["rollout"] if job.uses_rollout else [])]
    if all(job.ranks[role] for role in roles):
        idle = [rank for rank in range(job.world_size) if not any(rank in job.ranks[role] for role in roles)]
        if idle:
            flags = " and ".join(f"--{role}-ranks" for role in roles)
            yield f"{flags}: leave rank {idle[0]} of {job.world_size} ranks without work. Use all ranks, or fewer --nproc-per-node."


def _mesh(job: _Job) -> Iterator[str]:
    for role in ROLES:
        yield from _recompute(role, getattr(job.config, role), job.shape)
    actor, ranks = job.config.actor, job.ranks["actor"]
    tp, pp = actor.tensor_model_parallel_size, actor.pipeline_model_parallel_size
    if actor.sequence_parallel and tp == 1:
        yield "--sequence-parallel: needs --tensor-model-parallel-size above 1. Leave it out, or try --tensor-model-parallel-size 2."
    if job.shape is not None and any(split_findings(job.shape, tp, pp)):
        return  # no number of ranks would help; `_actor_shape` says what does
    if ranks and len(ranks) < tp * pp:
        yield (
            f"--tensor-model-parallel-size ({tp}) x --pipeline-model-parallel-size ({pp}) = {tp * pp}: needs as many ranks, and the "
            f"actor has {len(ranks)}. Try --nproc-per-node {tp * pp}."
        )
    elif ranks and len(ranks) % (tp * pp):
        yield (
            f"--tensor-model-parallel-size ({tp}) x --pipeline-model-parallel-size ({pp}) = {tp * pp}: must divide the actor's ranks "
            f"({len(ranks)}). Try --nproc-per-node {len(ranks) // (tp * pp) * tp * pp}."
        )


def _recompute(role: str, parallel: ParallelConfig, shape: ModelShape | None) -> Iterator[str]:
    """As TransformerConfig.__post_init__ and TransformerBlock demand, and what they would silently ignore."""
    granularity, layers = parallel.recompute_granularity, parallel.recompute_num_layers
    full = {"recompute_method": parallel.recompute_method, "recompute_num_layers": layers}
    for field, value in full.items():
        if granularity == "full" and value is None:
            yield f"--recompute-granularity (full): needs --{flag_name(field)}. Try --recompute-method uniform --recompute-num-layers 1."
        if granularity != "full" and value is not None:
            yield f"--{flag_name(field)} ({value}): has no effect without --recompute-granularity full. Leave it out, or set that."
    if parallel.recompute_modules is not None and granularity != "selective":
        modules = " ".join(parallel.recompute_modules)
        yield f"--recompute-modules ({modules}): has no effect without --recompute-granularity selective. Leave it out, or set that."
    if shape is not None and granularity == "full" and layers is not None:
        stage = max(1, shape.num_layers // parallel.pipeline_model_parallel_size)
        if layers > stage:
            yield f"--recompute-num-layers ({layers}): must be at most the {role}'s layers per pipeline stage ({stage}). Try {stage}."


def _batch(job: _Job) -> Iterator[str]:
    batch, dp = job.config.batch, job.data_parallel_size
    size, samples = batch.global_batch_size, batch.num_prompts * batch.num_samples_per_prompt
    fits = [n for n in _divisors(samples) if dp and n % dp == 0] if job.uses_rollout else [size - size % dp or dp, size - size % dp + dp] if dp else []
    advice = _try(fits, size)
    if dp and not fits:
        num_prompts = -(-batch.num_prompts // dp) * dp
        advice = f" Try --num-prompts {num_prompts} --global-batch-size {num_prompts * batch.num_samples_per_prompt}."
    if job.uses_rollout and samples % size:
        yield (
            f"--global-batch-size ({size}): must divide num_prompts ({batch.num_prompts}) x num_samples_per_prompt "
            f"({batch.num_samples_per_prompt}) = {samples}.{advice}"
        )
    if dp and size % dp:
        yield f"--global-batch-size ({size}): must be a multiple of the actor's data-parallel size ({dp}).{advice}"


def _optimizer(job: _Job) -> Iterator[str]:
    optimizer = job.config.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield f"--min-lr ({optimizer.min_lr:g}): must be at most --lr ({optimizer.lr:g}). Try {optimizer.lr / 10:g}."
    if optimizer.lr_decay_iters is not None and optimizer.lr_decay_iters <= optimizer.lr_warmup_iters:
        yield (
            f"--lr-decay-iters ({optimizer.lr_decay_iters}): must be above --lr-warmup-iters ({optimizer.lr_warmup_iters}). "
            f"Try {optimizer.lr_warmup_iters + 1}."
        )
    run = job.config.run
    if run.eval_interval and not job.config.data.eval_data:
        yield f"--eval-interval ({run.eval_interval}): needs --eval-data. Leave it out, or name held-out files."


def _evaluation(job: _Job) -> Iterator[str]:
    if not job.config.data.eval_data:
        yield "--eval-data: an evaluation needs held-out rows. Give one or more *.jsonl or *.parquet files."
    if not job.uses_rollout:
        yield "--algorithm (sft): an evaluation samples answers and scores them. Try --algorithm grpo."


def _actor_shape(job: _Job) -> Iterator[str]:
    actor = job.config.actor
    yield from split_findings(job.shape, actor.tensor_model_parallel_size, actor.pipeline_model_parallel_size)
    yield from _experts(job)


def _experts(job: _Job) -> Iterator[str]:
    """How the actor's mixture of experts is split, if it is one."""
    actor, shape, ranks = job.config.actor, job.shape, job.ranks["actor"]
    tp, pp, ep = actor.tensor_model_parallel_size, actor.pipeline_model_parallel_size, actor.expert_model_parallel_size
    etp = actor.expert_tensor_parallel_size or tp
    if shape.is_dense:
        for field in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if getattr(actor, field) not in (None, 1):
                value, family = getattr(actor, field), shape.model_type
                yield f"--{flag_name(field)} ({value}): needs a mixture of experts, and {family} is none. Leave it out."
        return
    if shape.num_moe_experts % ep:
        yield (f"--expert-model-parallel-size ({ep}): must divide the model's num_experts ({shape.num_moe_experts})."
               f"{_try(_divisors(shape.num_moe_experts), ep)}")  # fmt: skip
    if shape.moe_ffn_hidden_size % etp:
        yield (f"--expert-tensor-parallel-size ({etp}): must divide the model's moe_intermediate_size ({shape.moe_ffn_hidden_size})."
               f"{_try(_divisors(shape.moe_ffn_hidden_size), etp)}")  # fmt: skip
    if ranks and len(ranks) % (tp * pp) == 0 and len(ranks) // pp % (etp * ep):
        stage = len(ranks) // pp
        fits = [n for n in _divisors(shape.num_moe_experts) if stage % (etp * n) == 0]
        yield (f"--expert-model-parallel-size ({ep}) x --expert-tensor-parallel-size ({etp}) = {ep * etp}: must divide the ranks of a "
               f"pipeline stage ({stage}).{_try(fits, ep)}")  # fmt: skip
    if tp > 1 and not actor.sequence_parallel:
        yield (f"--tensor-model-parallel-size ({tp}): Megatron trains a mixture of experts with tensor parallelism only together with "
               "sequence parallelism. Try --sequence-parallel.")  # fmt: skip


def split_findings(shape: ModelShape, tp: int, pp: int) -> Iterator[str]:
    """Why Megatron cannot split the dense part of the model over `tp` x `pp` ranks."""
    sizes = {**_split_sizes(shape), "key-value heads": shape.num_query_groups}
    fits = [n for n in _divisors(shape.num_attention_heads) if not any(size % n for size in sizes.values())]
    for name, size in sizes.items():
        if size % tp:
            yield f"--tensor-model-parallel-size ({tp}): must divide the model's {name} ({size}).{_try(fits, tp)}"
    if shape.num_layers % pp:
        yield (
            f"--pipeline-model-parallel-size ({pp}): must divide the model's layers ({shape.num_layers})."
            f"{_try(_divisors(shape.num_layers), pp)}"
        )


def _rollout_shape(job: _Job) -> Iterator[str]:
    tp, groups, sizes = job.config.rollout.tensor_parallel_size, job.shape.num_query_groups, _split_sizes(job.shape)
    sizes |= {"moe_intermediate_size": job.shape.moe_ffn_hidden_size} if job.shape.is_moe else {}
    fits = [
        n
        for n in _divisors(job.shape.num_attention_heads)
        if not any(size % n for size in sizes.values()) and (groups % n == 0 or n % groups == 0)
    ]
    for name, size in sizes.items():
        if size % tp:
            yield f"--rollout-tensor-parallel-size ({tp}): must divide the model's {name} ({size}).{_try(fits, tp)}"
    if groups % tp and tp % groups:
        yield (
            f"--rollout-tensor-parallel-size ({tp}): must divide the model's key-value heads ({groups}), or be a multiple.{_try(fits, tp)}"
        )


def _split_sizes(shape: ModelShape) -> dict[str, int]:
    """What every tensor-parallel split cuts into equal parts. Experts are split otherwise."""
    return {
        "attention heads": shape.num_attention_heads,
        **({} if shape.is_moe else {"intermediate_size": shape.ffn_hidden_size}),
        "vocabulary, padded to a multiple of 64": shape.padded_vocab_size(),
    }


def _sequence_length(job: _Job) -> Iterator[str]:
    sampling, limit = job.config.sampling, job.shape.max_position_embeddings
    total = sampling.max_prompt_length + sampling.max_response_length
    if total > limit:
        rest = limit - sampling.max_prompt_length
        advice = f"Try --max-response-length {rest}." if rest > 0 else "Make both shorter."
        yield (
            f"--max-prompt-length ({sampling.max_prompt_length}) + --max-response-length ({sampling.max_response_length}) = {total}: "
            f"must be at most the model's max_position_embeddings ({limit}). {advice}"
        )


def _rollout_placement(job: _Job) -> Iterator[str]:
    tp, rollout = job.config.rollout.tensor_parallel_size, job.ranks["rollout"]
    if rollout and len(rollout) % tp:
        yield (
            f"--rollout-tensor-parallel-size ({tp}): must divide the ranks of the rollout engines ({len(rollout)})."
            f"{_try(_divisors(len(rollout)), tp)}"
        )
    if rollout and job.config.placement.rollout_engine == "in-process" and len(rollout) < job.world_size:
        yield (
            f"--rollout-engine (in-process): needs engines on all {job.world_size} ranks, and --rollout-ranks is "
            f"{job.config.placement.rollout_ranks}. Leave --rollout-ranks out, or try --rollout-engine out-of-process."
        )
    if rollout and job.config.reshard.reshard_double_buffer and engine_mode(job.config, job.world_size) == "in-process":
        yield "--reshard-double-buffer: an in-process engine has one buffer. Leave it out, or try --rollout-engine out-of-process."


def _sampling(job: _Job) -> Iterator[str]:
    sampling = job.config.sampling
    if sampling.temperature == 0:
        yield "--temperature (0): must be above 0, as greedy samples of one prompt are all alike. Try 1.0."
    if sampling.top_p != 1:
        yield (
            f"--top-p ({sampling.top_p:g}): must be 1 in training: the engine would draw from a truncated distribution, whose "
            "log-probs are not the policy's. Leave it out."
        )
    if sampling.top_k != 0:
        yield (
            f"--top-k ({sampling.top_k}): must be 0 (off) in training: the engine would draw from a truncated distribution, whose "
            "log-probs are not the policy's. Leave it out."
        )


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _try(values: Iterable[int], near: int) -> str:
    """' Try 64 or 128.': the two values nearest to the refused one."""
    nearest = sorted(sorted(set(values), key=lambda value: abs(value - near))[:2])
    return f" Try {' or '.join(map(str, nearest))}." if nearest else ""
