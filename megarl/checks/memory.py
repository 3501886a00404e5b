"""Estimate the bytes that each rank holds, by phase of a step.

docs/memory.md lists what is counted and what is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.algorithms.base import algorithm_of
from megarl.checks.activations import role_activations
from megarl.checks.machine import Machine
from megarl.checks.sizes import aliased_elements, engine_held, megatron_held
from megarl.config.hf_config import ModelShape
from megarl.config.kv_cache import GPU_MEMORY_UTILIZATION, free_gpu_memory_fraction, releases_kv_cache
from megarl.config.mesh import MeshSpec, actor_meshes, engine_mode, parallel_of
from megarl.config.reward_models import reward_models, value_model_shape
from megarl.config.roles import configs_of_actors, trained_models
from megarl.config.rollout_backends import rollout_backend
from megarl.config.teachers import teacher_folders
from megarl.config.schema import LoRAConfig, OptimizerConfig, TrainConfig
from megarl.reshard.report import ITEMSIZE
from megarl.rollout.gpu_memory import cuda_graph_bytes, engine_activation_bytes, gpu_kv_cache_bytes
from megarl.rollout.kv_cache import (
    CPU_BLOCK_SIZE,
    GPU_BLOCK_SIZE,
    cpu_kv_cache_bytes,
    most_sequences,
    num_cache_rows,
    sequence_bytes,
    useful_kv_cache_bytes,
)

GRADIENT_BYTES, MOMENT_BYTES, MASTER_BYTES = 4, 8, 4
"""Bytes per trained element, for any dtype of the weights.

Megatron reduces gradients in fp32, and Adam has two fp32 moments."""
_FSDP_SHARDS = {"optim": ("optimizer",), "optim_grads": ("optimizer", "gradients")}
PHASES = ("rollout", "log-probs", "update", "sync")
MARGIN = 0.05
"""Share of a GPU that is left free: for gaps between the blocks of PyTorch's allocator, for CUDA and NCCL."""
ESTIMATED = ("activations", "CUDA graphs", "margin")
"""Parts whose sizes no layout tells."""


@dataclass(frozen=True, slots=True)
class Part:
    """Memory of one kind, such as gradients, that a role holds on one rank.

    Args:
        role: name of the role; `device` for what belongs to none.
        name: parameters, gradients, optimizer, activations, engine, CUDA graphs, KV cache or margin.
        offloaded: whether the part is on the device only while a call needs it.
        during: the one phase in which the part exists, or None for all phases."""

    role: str
    name: str
    bytes: int
    offloaded: bool = False
    during: str | None = None

    def is_brought(self, phase: str) -> bool:
        """Return whether the part is on the device only for the call that runs in this phase."""
        return self.offloaded or self.during == phase


Parts = dict[int, tuple[Part, ...]]
"""Maps each rank to the parts on the rank."""


def estimate(config: TrainConfig, world_size: int, machine: Machine, trains: bool = True) -> Parts:
    """Return rank -> the parts of memory (parameters, gradients, KV cache, ...) that it needs, for a
    configuration without errors.

    If `trains` is False, the estimate is for `megarl eval`, which builds the actors, without an optimizer,
    and their engines. An actor computes nothing there: its weights are copied into its engines."""
    parts: dict[int, list[Part]] = {rank: [] for rank in range(world_size)}
    if machine.has_gpu and machine.gpu_bytes is not None:
        for of_rank in parts.values():
            of_rank.append(Part("device", "margin", int(MARGIN * machine.gpu_bytes)))
    actors = {
        suffix: _ActorParts(of_actor, world_size, machine)
        for suffix, of_actor in configs_of_actors(config).items()
    }
    for suffix, actor in actors.items():
        for rank, part in actor:
            if trains or part.role == "rollout" or (part.role, part.name) == ("actor", "parameters"):
                parts[rank].append(replace(part, role=part.role + suffix))
    for suffix, actor in actors.items():
        for rank, part in actor.kv_caches(parts):  # last: on a GPU a cache gets a share of what is free
            parts[rank].append(replace(part, role=part.role + suffix))
    return {rank: tuple(of_rank) for rank, of_rank in parts.items()}


def phase_bytes(parts: Sequence[Part], phase: str) -> int:
    """Return the bytes that the parts on one rank need in a phase of a step.

    Parts that a call brings back or computes with count for one call at a time."""
    roles = [[part for part in parts if part.role == role] for role in roles_of(parts)]
    engines = [own for own in roles if any(p.name == "engine" for p in own)]
    calls = {
        "rollout": engines,
        "log-probs": [[p for p in own if p.name in ("parameters", "activations")] for own in roles],
        "update": [own for own in roles if any(p.name == "optimizer" for p in own)],
        "sync": [[p for p in parts if p.role.startswith("actor") and p.name == "parameters"]],
    }[phase]
    brought = max((sum(p.bytes for p in call if p.is_brought(phase)) for call in calls), default=0)
    return sum(p.bytes for p in parts if not p.offloaded and p.during is None) + brought


def peak_phase(parts: Sequence[Part]) -> str:
    """Return the phase of a step in which the parts on one rank need most memory."""
    return max(PHASES, key=lambda phase: phase_bytes(parts, phase))


def peak_bytes(parts: Sequence[Part]) -> int:
    """Return the bytes that the parts on one rank need in the largest phase of a step."""
    return phase_bytes(parts, peak_phase(parts))


def roles_of(parts: Sequence[Part]) -> list[str]:
    return list(dict.fromkeys(part.role for part in parts))


class _ActorParts:
    """Iterates over (rank, part of memory) of one actor's roles. Role names have no actor number."""

    def __init__(self, config: TrainConfig, world_size: int, machine: Machine) -> None:
        self.config, self.world_size, self.machine = config, world_size, machine
        self.meshes = actor_meshes(config, world_size)
        self.shape = ModelShape.load(config.model.model)

    def __iter__(self) -> Iterator[tuple[int, Part]]:
        config, meshes, trained = self.config, self.meshes, trained_models(self.config)
        # the actor's model without its adapters may serve as the reference, as in build_roles
        actor_serves = (
            config.lora.lora_rank
            and self.shape.is_dense
            and config.reference == config.actor
            and config.model.reference_model is None
        )
        for role, mesh in meshes.items():
            if role == "actor" and algorithm_of(config).teacher_column == "teacher_hidden":
                yield from self._teacher_head(mesh)
            if role in trained:
                model = trained[role]
                yield from self._megatron(role, model.shape, model.optimizer, model.lora)
            elif role == "reference" and not (actor_serves and mesh == meshes["actor"]):
                if algorithm_of(config).precompute_ref_log_probs:
                    continue  # it is gone before the actor's model is built
                yield from self._megatron(role, ModelShape.load(config.model.reference_folder))
                for folder in teacher_folders(config.algorithm):
                    yield from self._megatron(role, ModelShape.load(folder))
        for model in reward_models(config):  # a judge runs in separate processes and is not counted
            if model.backend == "megatron":
                yield from self._megatron(model.name, value_model_shape(model.path))
            elif model.backend == "transformers":
                size = sum(file.stat().st_size for file in Path(model.path).glob("*.safetensors"))
                is_away = "parameters" in config.reward.offload and self.machine.has_gpu
                for rank in meshes[model.name].ranks:
                    yield rank, Part(model.name, "parameters", size, is_away)
        if "rollout" in meshes:
            yield from self._engines()

    def _megatron(
        self,
        role: str,
        shape: ModelShape,
        optimizer: OptimizerConfig | None = None,
        lora: LoRAConfig | None = None,
    ) -> Iterator[tuple[int, Part]]:
        """Yield (rank, part of memory) of one Megatron role. `optimizer` is None if the role is frozen."""
        parallel, bf16, mesh = parallel_of(self.config, role), self.config.model.bf16, self.meshes[role]
        away = parallel.offload if self.machine.has_gpu else ()  # a CPU has no other memory to offload to
        forward, update = role_activations(self.config, role, shape, mesh, on_cpu=not self.machine.has_gpu)
        for rank, held in megatron_held(shape, mesh, parallel.qkv_layout, lora).items():
            yield rank, Part(role, "parameters", held.total * (2 if bf16 else 4), "parameters" in away)
            yield rank, Part(role, "activations", forward, during="log-probs")
            if optimizer is None:
                continue
            yield rank, Part(role, "activations", update, during="update")
            dense, experts = (held.adapters, 0) if lora.lora_rank else (held.dense, held.experts)
            shard = -(-dense // (mesh.dp * mesh.cp)) + -(-experts // mesh.expert_shape["edp"])
            sizes = {name: shard for name in _sharded_parts(optimizer)}
            gradients = sizes.get("gradients", dense + experts) * GRADIENT_BYTES
            yield rank, Part(role, "gradients", gradients, "gradients" in away)
            state = sizes.get("optimizer", dense + experts) * (MOMENT_BYTES + MASTER_BYTES * bf16)
            on_device = 1 - optimizer.optimizer_offload_fraction * optimizer.optimizer_cpu_offload
            yield rank, Part(role, "optimizer", int(state * on_device), "optimizer" in away)

    def _teacher_head(self, mesh: MeshSpec) -> Iterator[tuple[int, Part]]:
        """Yield (rank, part of memory) of a teacher's output layer on the actor's last stage."""
        hidden = ModelShape.load(self.config.model.reference_folder).hidden_size
        size = self.shape.padded_vocab_size() // mesh.tp * hidden * (2 if self.config.model.bf16 else 4)
        for rank in mesh.ranks:
            if mesh.coordinates(rank)["pp"] == mesh.pp - 1:
                yield rank, Part("actor", "teacher's output layer", size)

    def _engines(self) -> Iterator[tuple[int, Part]]:
        """Yield (rank, part of memory) of the engines, without their KV cache."""
        config, rollout = self.config, self.meshes["rollout"]
        itemsize, is_inside = ITEMSIZE[config.engine_dtype], self._is_in_process
        held, shared = engine_held(self.shape, rollout.tp, config.rollout.backend), {}
        if is_inside and config.reshard.reshard_alias and config.engine_dtype == config.model.dtype:
            shared = aliased_elements(
                self.shape, self.meshes["actor"], rollout, config.actor.qkv_layout, config.rollout.backend
            )
        buffers = self._buffers
        for rank in rollout.ranks:
            yield rank, Part("rollout", "engine", (held - shared.get(rank, 0)) * itemsize * buffers)
        if not self.machine.has_gpu:
            return
        activations = engine_activation_bytes(config, self.shape, itemsize, self.machine.gpu_bytes)
        for rank in rollout.ranks:
            # an engine in processes of its own keeps the memory for its next rollout
            yield rank, Part("rollout", "activations", activations, during="rollout" if is_inside else None)
            yield rank, Part("rollout", "CUDA graphs", cuda_graph_bytes(config))

    @property
    def _is_in_process(self) -> bool:
        return engine_mode(self.config, self.world_size) == "in-process"

    @property
    def _buffers(self) -> int:
        """Number of copies of the weights that an engine rank holds."""
        return 2 if not self._is_in_process and _double_buffer(self.config, self.machine) else 1

    def kv_caches(self, parts: Mapping[int, Sequence[Part]]) -> Iterator[tuple[int, Part]]:
        """Yield (rank, KV cache) of this actor's engines, given all other parts of every rank."""
        if "rollout" not in self.meshes:
            return
        ranks = self.meshes["rollout"].ranks
        releases = self.machine.has_gpu and releases_kv_cache(self.config, self.world_size)
        # ranks with the same parts are one case: a check of 1,024 GPUs takes seconds
        cache = min(map(self._kv_cache_bytes, {tuple(parts[rank]) for rank in ranks}))
        for rank in ranks:
            yield rank, Part("rollout", "KV cache", cache, during="rollout" if releases else None)

    def _kv_cache_bytes(self, parts: Sequence[Part]) -> int:
        """Return the KV cache bytes of a rank with these other parts, or 0 if the memory of the GPUs is not
        known."""
        given, mesh = self.config.rollout, self.meshes["rollout"]
        itemsize = ITEMSIZE[self.config.engine_dtype]
        if not rollout_backend(self.config).has_blocks:
            if self.machine.has_gpu and self.machine.gpu_bytes is None:
                return 0
            row = sequence_bytes(
                self.shape, 1, itemsize, self.config.sampling.max_engine_length, block_size=1
            )
            gpu_bytes = self.machine.gpu_bytes if self.machine.has_gpu else None
            weights = engine_held(self.shape, 1, self.config.rollout.backend) * itemsize * self._buffers
            return row * num_cache_rows(self.config, row, mesh.dp, gpu_bytes, weights)
        if given.kv_cache_memory_bytes is not None:
            return given.kv_cache_memory_bytes
        if self.machine.has_gpu:
            there = self.machine.gpu_bytes or 0
            fraction = free_gpu_memory_fraction(self.config, self.world_size)
            if fraction is not None:
                useful = useful_kv_cache_bytes(self.config, self.shape, mesh.dp, itemsize)
                free = there - phase_bytes(parts, "rollout")
                return gpu_kv_cache_bytes(self.config, free, fraction, useful)
            share = given.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
            return max(0, int(share * there) - engine_bytes(self.config, self.world_size, self.machine))
        return cpu_kv_cache_bytes(
            self.shape,
            mesh.tp,
            itemsize,
            most_sequences(self.config, mesh.dp),
            self.config.sampling.max_engine_length,
            given.block_size or CPU_BLOCK_SIZE,
        )


def _sharded_parts(optimizer: OptimizerConfig) -> tuple[str, ...]:
    """Return the names of the parts, optimizer or gradients, that are sharded over data-parallel ranks."""
    if optimizer.use_megatron_fsdp:
        return _FSDP_SHARDS[optimizer.data_parallel_sharding_strategy]
    return ("optimizer",) if optimizer.use_distributed_optimizer else ()


def engine_bytes(config: TrainConfig, world_size: int, machine: Machine) -> int:
    """Return the bytes of GPU memory that a rank of the first actor's engines needs, without its KV cache."""
    shape, itemsize = ModelShape.load(config.model.model), ITEMSIZE[config.engine_dtype]
    is_outside = engine_mode(config, world_size) == "out-of-process"
    buffers = 2 if is_outside and _double_buffer(config, machine) else 1
    return (
        engine_held(shape, config.rollout.tensor_parallel_size, config.rollout.backend) * itemsize * buffers
        + engine_activation_bytes(config, shape, itemsize, machine.gpu_bytes)
        + cuda_graph_bytes(config)
    )


def longest_sequence_bytes(config: TrainConfig, machine: Machine) -> int:
    """Return the KV cache bytes of one sequence of full length on a rank of the first actor's engines."""
    block = config.rollout.block_size or (GPU_BLOCK_SIZE if machine.has_gpu else CPU_BLOCK_SIZE)
    block = block if rollout_backend(config).has_blocks else 1
    shape, itemsize = ModelShape.load(config.model.model), ITEMSIZE[config.engine_dtype]
    tp, length = config.rollout.tensor_parallel_size, config.sampling.max_engine_length
    return sequence_bytes(shape, tp, itemsize, length, block)


def _double_buffer(config: TrainConfig, machine: Machine) -> bool:
    """Return whether an out-of-process engine holds its weights twice."""
    if config.reshard.reshard_double_buffer is not None:
        return config.reshard.reshard_double_buffer
    on_cpu = not machine.has_gpu
    return on_cpu and rollout_backend(config).is_eager(config.rollout.enforce_eager, on_cpu)
