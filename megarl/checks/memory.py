"""Estimate the bytes that each rank holds, by phase of a step.

docs/memory.md lists what is counted and what is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.checks.activations import role_activations
from megarl.checks.machine import Machine
from megarl.checks.sizes import aliased_elements, engine_held, megatron_held
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec, actor_meshes, engine_mode, parallel_of
from megarl.config.reward_models import reward_models, value_model_shape
from megarl.config.roles import configs_of_actors
from megarl.config.schema import LoRAConfig, OptimizerConfig, TrainConfig
from megarl.reshard.report import ITEMSIZE
from megarl.rollout.kv_cache import (
    CPU_BLOCK_SIZE,
    GPU_BLOCK_SIZE,
    cpu_kv_cache_bytes,
    most_sequences,
    sequence_bytes,
)

GRADIENT_BYTES, MOMENT_BYTES, MASTER_BYTES = 4, 8, 4
"""Bytes per trained element, for any dtype of the weights.

Megatron reduces gradients in fp32, and Adam has two fp32 moments."""
_FSDP_SHARDS = {"optim": ("optimizer",), "optim_grads": ("optimizer", "gradients")}
PHASES = ("rollout", "log-probs", "update", "sync")


@dataclass(frozen=True, slots=True)
class Part:
    """Memory of one kind that a role holds on one rank.

    Args:
        name: parameters, gradients, optimizer, activations, engine or KV cache.
        offloaded: whether the part is on the device only while a call needs it.
        during: the one phase in which the part exists, or None for all phases."""

    role: str
    name: str
    bytes: int
    offloaded: bool = False
    during: str | None = None

    def is_brought(self, phase: str) -> bool:
        """Return whether the part is on the device because of the call that runs in this phase."""
        return self.offloaded or self.during == phase


Parts = dict[int, tuple[Part, ...]]
"""Maps each rank to the parts on the rank."""


def estimate(config: TrainConfig, world_size: int, machine: Machine, trains: bool = True) -> Parts:
    """Estimate the parts on each rank of a configuration without errors.

    If `trains` is False, the estimate is for `megarl eval`, which builds only the first actor and its
    engines."""
    parts: dict[int, list[Part]] = {rank: [] for rank in range(world_size)}
    for suffix, of_actor in configs_of_actors(config).items():
        for rank, part in _of_actor(of_actor, world_size, machine):
            if trains or part.role + suffix in ("actor", "rollout"):
                parts[rank].append(replace(part, role=part.role + suffix))
    return {rank: tuple(of_rank) for rank, of_rank in parts.items()}


def phase_bytes(parts: Sequence[Part], phase: str) -> int:
    """Return the bytes on one rank in a phase.

    Parts that a call brings back or computes with count for one call at a time."""
    calls = {
        "rollout": [],
        "log-probs": [
            [p for p in parts if p.role == role and p.name in ("parameters", "activations")]
            for role in roles_of(parts)
        ],
        "update": [
            [p for p in parts if p.role == role]
            for role in roles_of(parts)
            if any(p.role == role and p.name == "optimizer" for p in parts)
        ],
        "sync": [[p for p in parts if p.role.startswith("actor") and p.name == "parameters"]],
    }[phase]
    brought = max((sum(p.bytes for p in call if p.is_brought(phase)) for call in calls), default=0)
    return sum(p.bytes for p in parts if not p.offloaded and p.during is None) + brought


def peak_phase(parts: Sequence[Part]) -> str:
    """Return the phase that needs most memory."""
    return max(PHASES, key=lambda phase: phase_bytes(parts, phase))


def peak_bytes(parts: Sequence[Part]) -> int:
    """Return the bytes that a step needs in its largest phase."""
    return phase_bytes(parts, peak_phase(parts))


def roles_of(parts: Sequence[Part]) -> list[str]:
    return list(dict.fromkeys(part.role for part in parts))


def _of_actor(config: TrainConfig, world_size: int, machine: Machine) -> Iterator[tuple[int, Part]]:
    """Yield (rank, part) of one actor's roles. Role names have no actor number."""
    meshes = actor_meshes(config, world_size)
    shape = ModelShape.load(config.model.model)
    critic_folder = config.model.critic_model or config.model.model
    shapes = {
        "actor": shape,
        "reference": shape,
        **({"critic": ModelShape.load(critic_folder, value_head=True)} if "critic" in meshes else {}),
    }
    if (
        config.lora.lora_rank
        and shape.is_dense
        and meshes.get("reference") == meshes["actor"]
        and config.reference == config.actor
    ):
        # the actor's model without its adapters serves as the reference, as in build_roles
        del shapes["reference"]
    for role, of_role in shapes.items():
        if role in meshes:
            optimizer, lora = {
                "actor": (config.optimizer, config.lora),
                "critic": (config.critic_optimizer, config.critic_lora),
            }.get(role, (None, None))
            yield from _megatron_parts(config, role, of_role, meshes[role], optimizer, lora, machine)
    yield from _reward_parts(config, meshes, machine)
    if "rollout" in meshes:
        yield from _engine_parts(config, shape, meshes, world_size, machine)


def _megatron_parts(
    config: TrainConfig,
    role: str,
    shape: ModelShape,
    mesh: MeshSpec,
    optimizer: OptimizerConfig | None,
    lora: LoRAConfig | None,
    machine: Machine,
) -> Iterator[tuple[int, Part]]:
    """Yield (rank, part) of one Megatron role. `optimizer` is None if the role is frozen."""
    parallel, bf16 = parallel_of(config, role), config.model.bf16
    away = parallel.offload if machine.has_gpu else ()  # a CPU has no other memory to offload to
    shards, expert_shards = mesh.dp * mesh.cp, mesh.expert_shape["edp"]
    sharded = () if optimizer is None else _sharded_parts(optimizer)
    forward, update = role_activations(config, role, shape, mesh, on_cpu=not machine.has_gpu)
    for rank, held in megatron_held(shape, mesh, parallel.qkv_layout, lora).items():
        yield rank, Part(role, "parameters", held.total * (2 if bf16 else 4), "parameters" in away)
        yield rank, Part(role, "activations", forward, during="log-probs")
        if optimizer is not None:
            yield rank, Part(role, "activations", update, during="update")
        if optimizer is None:
            continue
        dense, experts = (
            (held.adapters, 0) if lora is not None and lora.lora_rank else (held.dense, held.experts)
        )
        trained, shard = dense + experts, -(-dense // shards) + -(-experts // expert_shards)
        on_device = 1 - optimizer.optimizer_offload_fraction * optimizer.optimizer_cpu_offload
        yield (
            rank,
            Part(
                role,
                "gradients",
                (shard if "gradients" in sharded else trained) * GRADIENT_BYTES,
                "gradients" in away,
            ),
        )
        state = (shard if "optimizer" in sharded else trained) * (MOMENT_BYTES + MASTER_BYTES * bf16)
        yield rank, Part(role, "optimizer", int(state * on_device), "optimizer" in away)


def _sharded_parts(optimizer: OptimizerConfig) -> tuple[str, ...]:
    """Return the parts that are sharded over data-parallel ranks."""
    if optimizer.use_megatron_fsdp:
        return _FSDP_SHARDS[optimizer.data_parallel_sharding_strategy]
    return ("optimizer",) if optimizer.use_distributed_optimizer else ()


def _reward_parts(
    config: TrainConfig, meshes: Mapping[str, MeshSpec], machine: Machine
) -> Iterator[tuple[int, Part]]:
    """Yield (rank, part) of the reward models. A judge runs in separate processes and is not counted."""
    for model in reward_models(config):
        mesh = meshes[model.name]
        if model.backend == "megatron":
            shape = value_model_shape(model.path)
            yield from (
                (rank, replace(part, role=model.name))
                for rank, part in _megatron_parts(config, "reward", shape, mesh, None, None, machine)
            )
        elif model.backend == "transformers":
            size = sum(file.stat().st_size for file in Path(model.path).glob("*.safetensors"))
            yield from (
                (
                    rank,
                    Part(
                        model.name,
                        "parameters",
                        size,
                        "parameters" in config.reward.offload and machine.has_gpu,
                    ),
                )
                for rank in mesh.ranks
            )


def _engine_parts(
    config: TrainConfig, shape: ModelShape, meshes: Mapping[str, MeshSpec], world_size: int, machine: Machine
) -> Iterator[tuple[int, Part]]:
    actor, rollout = meshes["actor"], meshes["rollout"]
    trained = "bfloat16" if config.model.bf16 else "float32"
    dtype = trained if config.rollout.dtype == "auto" else config.rollout.dtype
    itemsize, in_process = ITEMSIZE[dtype], engine_mode(config, world_size) == "in-process"
    held, shared = engine_held(shape, rollout.tp), {}
    if in_process and config.reshard.reshard_alias and dtype == trained:
        shared = aliased_elements(shape, actor, rollout, config.actor.qkv_layout)
    buffers = 2 if not in_process and _double_buffer(config, machine) else 1
    cache = _kv_cache_bytes(config, shape, rollout, itemsize, held * itemsize * buffers, machine)
    for rank in rollout.ranks:
        yield rank, Part("rollout", "engine", (held - shared.get(rank, 0)) * itemsize * buffers)
        yield rank, Part("rollout", "KV cache", cache)


def longest_sequence_bytes(config: TrainConfig, machine: Machine) -> int:
    """Return the KV cache bytes of one sequence of full length on a rank of the first actor's engines."""
    shape, length = (
        ModelShape.load(config.model.model),
        config.sampling.max_prompt_length + config.sampling.max_response_length,
    )
    trained = "bfloat16" if config.model.bf16 else "float32"
    itemsize = ITEMSIZE[trained if config.rollout.dtype == "auto" else config.rollout.dtype]
    block = config.rollout.block_size or (GPU_BLOCK_SIZE if machine.has_gpu else CPU_BLOCK_SIZE)
    return sequence_bytes(shape, config.rollout.tensor_parallel_size, itemsize, length, block)


def _double_buffer(config: TrainConfig, machine: Machine) -> bool:
    eager = (
        config.rollout.enforce_eager is True or config.rollout.enforce_eager is None and not machine.has_gpu
    )
    wanted = config.reshard.reshard_double_buffer
    return not machine.has_gpu and eager if wanted is None else wanted


def _kv_cache_bytes(
    config: TrainConfig, shape: ModelShape, rollout: MeshSpec, itemsize: int, weights: int, machine: Machine
) -> int:
    """Return the KV cache bytes of a rank, or 0 if not known.

    On a GPU the cache is what --rollout-gpu-memory-utilization leaves."""
    given, sampling = config.rollout.kv_cache_memory_bytes, config.sampling
    if given is not None:
        return given
    if machine.has_gpu:
        return (
            max(0, int(config.rollout.gpu_memory_utilization * machine.gpu_bytes) - weights)
            if machine.gpu_bytes
            else 0
        )
    return cpu_kv_cache_bytes(
        shape,
        rollout.tp,
        itemsize,
        most_sequences(config, rollout.dp),
        sampling.max_prompt_length + sampling.max_response_length,
        config.rollout.block_size or CPU_BLOCK_SIZE,
    )
