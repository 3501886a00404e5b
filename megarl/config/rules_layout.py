"""Check how roles, experts and engines are split over ranks.

`Job` and `MegatronRole` hold the data that these rules and those of rules_training.py need."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from megarl.config.errors import ConfigError, Errors, divisors, must_divide, try_numbers
from megarl.config.flags import ROLES, flag_name, refuse_set
from megarl.config.hf_config import ModelShape
from megarl.config.installed import installed_version
from megarl.config.mesh import engine_mode, experts_fit, parallel_of, replicas_fit
from megarl.config.reward_models import reward_models, value_model_shape
from megarl.config.roles import Ranks, trained_models
from megarl.config.schema import LoRAConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megarl.config.teachers import teacher_folders
from megarl.role_names import kind_and_suffix


@dataclass(frozen=True, slots=True)
class MegatronRole:
    """The parallel sizes, ranks, model shape and optimizer of one role that Megatron runs.

    Args:
        name: actor, critic, reference, or reward.
        ranks: None if their flag has an error, which another rule reports.
        shape: shape of the role's model, None if config.json has errors.
        shared: fields that have the same value in all roles. Errors name their flag of all roles.
        optimizer, lora: None for a frozen role."""

    name: str
    parallel: ParallelConfig
    ranks: Ranks | None
    shape: ModelShape | None
    shared: frozenset[str]
    optimizer: OptimizerConfig | None = None
    lora: LoRAConfig | None = None

    def flag(self, field: str) -> str:
        """Return the flag of a field: the role's, e.g. --critic-lr, or that of all roles if they agree."""
        return f"--{flag_name(field, '' if field in self.shared else f'{self.name}-')}"

    @property
    def tp(self) -> int:
        return self.parallel.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        return self.parallel.pipeline_model_parallel_size

    @property
    def vpp(self) -> int:
        return self.parallel.virtual_pipeline_model_parallel_size

    @property
    def cp(self) -> int:
        return self.parallel.context_parallel_size


@dataclass(frozen=True)
class Job:
    """The configuration, model shapes and ranks of one actor with its roles, in the form that the rules need.

    Args:
        shape: shape of the actor's model, None if config.json has errors.
        critic_shape: shape of the critic's model, with its value head.
        ranks: role -> its ranks, None if their flag has an error."""

    config: TrainConfig
    shape: ModelShape | None
    critic_shape: ModelShape | None
    world_size: int
    ranks: Mapping[str, Ranks | None]

    @property
    def uses_rollout(self) -> bool:
        return self.config.algorithm.needs_rollout

    @property
    def data_parallel_size(self) -> int | None:
        """The actor's data-parallel size; None if its ranks cannot be split."""
        actor = self.megatron_roles[0]
        if not actor.ranks or not replicas_fit(len(actor.ranks), actor.tp, actor.cp, actor.pp):
            return None
        return len(actor.ranks) // (actor.tp * actor.cp * actor.pp)

    @property
    def engine(self) -> str | None:
        """Mode of the engines, 'in-process' or 'out-of-process'; None without engines or with wrong ranks."""
        places_all = self.uses_rollout and all(self.ranks.values())
        return engine_mode(self.config, self.world_size) if places_all else None

    @functools.cached_property
    def megatron_roles(self) -> list[MegatronRole]:
        """The roles that Megatron runs, the actor first."""
        config, roles, of_model = self.config, [], self._reward_shapes()
        present = [role for role in ROLES if getattr(config, role) is not None]
        shared, models = _shared_fields(config, present), trained_models(config)
        for name, ranks in self.ranks.items():
            role = kind_and_suffix(name)[0].removesuffix("_model")
            if role not in present or (role == "reward" and name not in of_model):
                continue
            others = {
                "critic": self.critic_shape,
                "reward": of_model.get(name),
                "reference": self.reference_shape,
            }
            shape = others.get(role, self.shape)
            trained = models[role][1:3] if role in models else ()
            roles.append(MegatronRole(role, parallel_of(config, name), ranks, shape, shared, *trained))
        return roles

    @property
    def trained_roles(self) -> list[MegatronRole]:
        """The actor and, if there is one, the critic."""
        return [role for role in self.megatron_roles if role.optimizer is not None]

    @functools.cached_property
    def reference_shape(self) -> ModelShape | None:
        """Shape of the reference's model; None for one with errors, which are reported elsewhere."""
        folder = self.config.model.reference_model
        try:
            return ModelShape.load(folder) if folder else self.shape
        except ConfigError:
            return None

    def _reward_shapes(self) -> dict[str, ModelShape]:
        """Return reward model -> shape for those that Megatron runs; {} if one has errors, which are
        reported elsewhere."""
        try:
            models = [model for model in reward_models(self.config) if model.backend == "megatron"]
            return {model.name: value_model_shape(model.path) for model in models}
        except ValueError:
            return {}


def _shared_fields(config: TrainConfig, present: Iterable[str]) -> frozenset[str]:
    """Return the names of the fields (parallelism, optimizer, LoRA) with the same value in all roles.

    Of the fields of optimizer or LoRA, all are returned or none."""
    nodes = [getattr(config, role) for role in present]
    shared = [f.name for f in fields(ParallelConfig) if len({getattr(node, f.name) for node in nodes}) == 1]
    if config.critic_optimizer in (None, config.optimizer):
        shared += [field.name for field in fields(OptimizerConfig)]
    if config.critic_lora in (None, config.lora):
        shared += [field.name for field in fields(LoRAConfig)]
    return frozenset(shared)


def executor(job: Job) -> Errors:
    """Yield an error for --executor inline with several ranks, and for --executor ray without its package."""
    placement = job.config.placement
    if placement.executor == "ray" and installed_version("ray") is None:
        yield "--executor (ray): needs the package ray. Try pip install 'megarl[ray]', or --executor torchrun."
    if placement.executor == "inline" and (job.world_size, placement.nproc_per_node) != (1, 1):
        ranks = max(job.world_size, placement.nproc_per_node)
        yield f"--executor (inline): has one rank, not {ranks}. Try --nproc-per-node 1."


def idle_ranks(ranks_of: Mapping[str, Sequence[int] | None], world_size: int) -> Errors:
    """Yield an error if a rank has no role. If some role's ranks are None, because their flag has an error,
    nothing is checked."""
    if not all(ranks_of.values()):
        return
    idle = [rank for rank in range(world_size) if not any(rank in ranks for ranks in ranks_of.values())]
    if not idle:
        return
    flags = list(dict.fromkeys(_ranks_flag(role) for role in ranks_of))
    if idle == list(range(idle[0], world_size)):
        advice = f"--nproc-per-node {idle[0]}"
    else:
        advice = f"{flags[0]} 0-{world_size - 1}"
    yield f"{' and '.join(flags)}: leave rank {idle[0]} of {world_size} ranks without work. Try {advice}."


def idle_ranks_of_actor(job: Job) -> Errors:
    """Yield an error if a rank has no role, for a job with one actor."""
    if job.config.placement.num_actors == 1:
        yield from idle_ranks(job.ranks, job.world_size)


def _ranks_flag(role: str) -> str:
    """Return the flag of a role's ranks, e.g. --actor-2-ranks. Reward models share one flag."""
    kind, suffix = kind_and_suffix(role)
    return "--reward-ranks" if kind == "reward_model" else f"--{kind}{suffix.replace('_', '-')}-ranks"


def megatron_roles(job: Job) -> Errors:
    """Yield an error per rule about parallel sizes that a role breaks, for all roles that Megatron runs."""
    for role in job.megatron_roles:
        yield from parallel_errors(role)
        if role.name == "reference":
            for folder in teacher_folders(job.config.algorithm):
                with contextlib.suppress(ConfigError):  # reported elsewhere
                    yield from parallel_errors(replace(role, shape=ModelShape.load(folder)))


def parallel_errors(role: MegatronRole) -> Errors:
    """Yield an error per rule about parallel sizes that one role breaks."""
    for rule in (recompute, role_ranks, virtual_pipeline, dense_split, expert_split, qkv_layout):
        yield from rule(role)


def recompute(role: MegatronRole) -> Errors:
    """Yield an error per recompute flag that Megatron refuses or would ignore."""
    parallel, flag = role.parallel, role.flag
    granularity, layers = parallel.recompute_granularity, parallel.recompute_num_layers
    granularity_flag, layers_flag = flag("recompute_granularity"), flag("recompute_num_layers")
    of_full = ("recompute_method", "recompute_num_layers")
    for needed, names in {"full": of_full, "selective": ("recompute_modules",)}.items():
        if granularity != needed:
            reason = f"has no effect without {granularity_flag} {needed}. Leave it out, or set that."
            yield from refuse_set(parallel, reason, *names, flag_of=flag)
    for field in of_full:
        if granularity == "full" and getattr(parallel, field) is None:
            yield (
                f"{granularity_flag} (full): needs {flag(field)}. Try {flag('recompute_method')} uniform "
                f"{layers_flag} 1."
            )
    modules, shape = parallel.recompute_modules or (), role.shape
    if "mlp" in modules and shape is not None and all(map(shape.is_moe_layer, range(shape.num_layers))):
        yield (
            f"{flag('recompute_modules')} ({' '.join(modules)}): mlp has no effect on mixtures of experts, "
            f"and all layers are. Leave it out, or try {granularity_flag} full."
        )
    if role.shape is not None and granularity == "full" and layers is not None:
        held = max(1, role.shape.num_layers // (role.pp * role.vpp))
        what = "model chunk" if role.vpp > 1 else "pipeline stage"
        if layers > held:
            yield (
                f"{layers_flag} ({layers}): must be at most the {role.name}'s layers per {what} ({held}). "
                f"Try {held}."
            )
        elif parallel.recompute_method == "uniform":
            yield from must_divide(layers_flag, layers, f"the {role.name}'s layers per {what}", held)


def role_ranks(role: MegatronRole) -> Errors:
    """Yield an error if a role's parallel sizes do not divide its ranks, or sequence parallelism is on
    without tensor parallelism."""
    tp_flag = role.flag("tensor_model_parallel_size")
    if role.parallel.sequence_parallel and role.tp == 1:
        yield (
            f"{role.flag('sequence_parallel')}: needs {tp_flag} above 1. Leave it out, or try {tp_flag} 2."
        )
    if any(dense_split(role)):
        return  # no number of ranks would help; `dense_split` proposes what does
    sizes = {tp_flag: role.tp, role.flag("pipeline_model_parallel_size"): role.pp}
    if role.cp > 1:
        sizes = {tp_flag: role.tp, role.flag("context_parallel_size"): role.cp} | sizes
    size, count = role.tp * role.cp * role.pp, len(role.ranks or ())
    product = f"{' x '.join(f'{flag} ({value})' for flag, value in sizes.items())} = {size}"
    if role.ranks and count < size:
        yield (
            f"{product}: needs as many ranks, and the {role.name} has {count}. Try --nproc-per-node {size}."
        )
    elif role.ranks and not replicas_fit(count, role.tp, role.cp, role.pp):
        yield (
            f"{product}: must divide the {role.name}'s ranks ({count}). Try --nproc-per-node "
            f"{count // size * size}."
        )


def virtual_pipeline(role: MegatronRole) -> Errors:
    """Yield an error for model chunks that do not divide a pipeline stage's layers, or without a pipeline."""
    flag = role.flag("virtual_pipeline_model_parallel_size")
    pp_flag = role.flag("pipeline_model_parallel_size")
    layers = role.shape.num_layers if role.shape is not None else 0
    if role.vpp > 1 and role.pp == 1:
        advice = f", or try {pp_flag} 2" if layers % (2 * role.vpp) == 0 else ""
        yield f"{flag} ({role.vpp}): needs {pp_flag} above 1. Leave it out{advice}."
    elif layers % role.pp == 0:
        what = f"the {role.name}'s layers per pipeline stage"
        yield from must_divide(flag, role.vpp, what, layers // role.pp)


def dense_split(role: MegatronRole) -> Errors:
    """Yield an error per tensor- or pipeline-parallel size by which Megatron cannot split the model, experts
    aside."""
    shape, num_ranks = role.shape, len(role.ranks or ()) // role.cp
    if shape is None:
        return
    tp_flag = role.flag("tensor_model_parallel_size")
    yield from _tensor_split(tp_flag, role.tp, shape, split_dimensions(shape), num_ranks, role.pp)
    stages = divisors(shape.num_layers)
    stages = [n for n in stages if num_ranks % (n * role.tp) == 0] or stages
    pp_flag = role.flag("pipeline_model_parallel_size")
    yield from must_divide(pp_flag, role.pp, "the model's layers", shape.num_layers, stages)


def split_dimensions(shape: ModelShape) -> dict[str, int]:
    """Return name -> size of the dimensions that tensor parallelism splits, except those of experts."""
    sizes = {"attention heads": shape.num_attention_heads}
    if shape.is_dense or shape.dense_layers:
        sizes["intermediate_size"] = shape.ffn_hidden_size
    if shape.is_moe and shape.moe_shared_expert_intermediate_size:
        sizes["shared experts' intermediate size"] = shape.moe_shared_expert_intermediate_size
    return sizes | {"vocabulary, padded to a multiple of 64": shape.padded_vocab_size()}


def _shares_heads(shape: ModelShape, tp: int) -> bool:
    """Return whether a tensor-parallel size splits the key-value heads evenly: each rank has whole heads, or
    equally many ranks share each head."""
    return shape.num_query_groups % tp == 0 or tp % shape.num_query_groups == 0


def _tensor_split(
    flag: str, tp: int, shape: ModelShape, dimensions: Mapping[str, int], num_ranks: int = 0, pp: int = 1
) -> Errors:
    """Yield an error if a tensor-parallel size does not divide the dimensions or does not split the key-value
    heads evenly.

    Sizes are proposed by which `num_ranks` ranks can be split into `pp` stages, if there are any."""
    sizes = [n for n in divisors(shape.num_attention_heads) if _shares_heads(shape, n)]
    sizes = [n for n in sizes if not any(size % n for size in dimensions.values())]
    sizes = [n for n in sizes if num_ranks % (n * pp) == 0] or sizes
    for name, size in dimensions.items():
        yield from must_divide(flag, tp, f"the model's {name}", size, sizes)
    if not _shares_heads(shape, tp):
        yield (
            f"{flag} ({tp}): must divide the model's key-value heads ({shape.num_query_groups}), or be a "
            f"multiple of them.{try_numbers(sizes, tp)}"
        )


def expert_split(role: MegatronRole) -> Errors:
    """Yield an error per size by which a mixture's experts cannot be split, and per expert size that is set
    for a dense model."""
    shape, flag, tp, ep = role.shape, role.flag, role.tp, role.parallel.expert_model_parallel_size
    if shape is None:
        return
    if shape.is_dense:
        for field in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if (value := getattr(role.parallel, field)) not in (None, 1):
                yield (
                    f"{flag(field)} ({value}): needs a mixture of experts, and {shape.model_type} is none. "
                    "Leave it out."
                )
        return
    etp, experts = role.parallel.expert_tensor_parallel_size or tp, shape.num_moe_experts
    ep_flag, etp_flag = flag("expert_model_parallel_size"), flag("expert_tensor_parallel_size")
    yield from must_divide(ep_flag, ep, "the model's num_experts", experts)
    yield from must_divide(etp_flag, etp, "the model's moe_intermediate_size", shape.moe_ffn_hidden_size)
    count = len(role.ranks or ())
    stage = count // role.pp
    if role.ranks and replicas_fit(count, tp, role.cp, role.pp) and not experts_fit(stage, ep, etp):
        fits = [n for n in divisors(experts) if experts_fit(stage, n, etp)]
        yield (
            f"{ep_flag} ({ep}) x {etp_flag} ({etp}) = {ep * etp}: must divide the ranks of a pipeline stage "
            f"({stage}).{try_numbers(fits, ep) or f' Try {etp_flag} 1.'}"
        )
    if tp > 1 and not role.parallel.sequence_parallel:
        yield (
            f"{flag('tensor_model_parallel_size')} ({tp}): Megatron trains a mixture of experts with tensor "
            f"parallelism only together with sequence parallelism. Try {flag('sequence_parallel')}."
        )


def qkv_layout(role: MegatronRole) -> Errors:
    """Yield an error for --qkv-layout stacked if ranks share key-value heads or there is no linear_qkv."""
    if role.shape is None or role.parallel.qkv_layout != "stacked":
        return
    flag, groups = role.flag("qkv_layout"), role.shape.num_query_groups
    if role.shape.is_mla:
        yield (
            f"{flag} (stacked): {role.shape.model_type} has latent attention, and no linear_qkv. "
            "Leave it out."
        )
    elif groups % role.tp:
        yield (
            f"{flag} (stacked): needs whole key-value heads on each rank: "
            f"{role.flag('tensor_model_parallel_size')} ({role.tp}) must divide the model's ({groups}). "
            f"Try {flag} grouped."
        )


def engine_ranks(job: Job) -> Errors:
    """Yield an error if engines do not fit their ranks, or other flags contradict in-process engines."""
    tp, ranks, placement = job.config.rollout.tensor_parallel_size, job.ranks["rollout"], job.config.placement
    if not ranks:
        return
    yield from must_divide(
        "--rollout-tensor-parallel-size", tp, "the ranks of the rollout engines", len(ranks)
    )
    if placement.rollout_engine == "in-process" and len(ranks) < job.world_size:
        yield (
            f"--rollout-engine (in-process): needs engines on all {job.world_size} ranks, and "
            f"--rollout-ranks is {placement.rollout_ranks}. Leave --rollout-ranks out, or try "
            "--rollout-engine out-of-process."
        )
    if job.config.reshard.reshard_double_buffer and job.engine == "in-process":
        yield (
            "--reshard-double-buffer: an in-process engine has one buffer. Leave it out, or try "
            "--rollout-engine out-of-process."
        )


def engine_split(job: Job) -> Errors:
    """Yield an error if vLLM cannot split the model by --rollout-tensor-parallel-size."""
    shape, tp = job.shape, job.config.rollout.tensor_parallel_size
    if shape is not None:
        experts = {"moe_intermediate_size": shape.moe_ffn_hidden_size} if shape.is_moe else {}
        dimensions = split_dimensions(shape) | experts
        yield from _tensor_split("--rollout-tensor-parallel-size", tp, shape, dimensions)
