"""Set up one rank: join the torch world, and build the roles that the rank hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl.algorithms.base import algorithm_of
from megarl.batch import expert_dtype
from megarl.collectives import all_gather_messages
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import (
    MeshSpec,
    group_timeout,
    role_meshes,
    shard_keys,
    scores_untrained,
    training_data_roles,
)
from megarl.config.reward_models import reward_models
from megarl.config.roles import checkpointed_roles, configs_of_actors, tells_experts, trains_in_fp32
from megarl.config.schema import TrainConfig
from megarl.megatron.mesh import create_groups
from megarl.megatron.transformer_engine import transformer_engine_problem, transformer_engine_version
from megarl.role_names import actor_suffix, kind_and_suffix
from megarl.workers.actor import ActorRole
from megarl.workers.checkpoint_writer import CheckpointWriter
from megarl.workers.critic import CostCriticRole, CriticRole
from megarl.workers.data import DataRole
from megarl.runtime.hosting import WorkerContext
from megarl.runtime.mailbox import world_store
from megarl.workers.offload_manager import OffloadManager
from megarl.workers.reference import AdapterlessReferenceRole, ReferenceRole
from megarl.workers.reward_model import RewardModelRole
from megarl.workers.store import SampleStore
from megarl.workers.teaching import wide_formats

if TYPE_CHECKING:
    from megarl.workers.rollout import RolloutRole

_WRITE_TIMEOUT = timedelta(days=1)
"""Timeout of checkpoint writers: one rank may write for long while the others wait in their threads.

A rank that dies is noticed at once."""


def join_world(timeout_s: float) -> None:
    """Initialize torch.distributed from torchrun's environment: gloo for CPU tensors, NCCL for CUDA tensors.

    The function does nothing in a process that has already joined, because jobs of one rank may follow each
    other in a process.

    Args:
        timeout_s: seconds that a call may take. Ranks wait for each other a little longer (`group_timeout`).
    Raises: RuntimeError if there are more ranks on this machine than GPUs, or if Transformer Engine is usable
    on some ranks only."""
    if dist.is_initialized():
        return
    torch.set_num_threads(
        int(os.environ.get("OMP_NUM_THREADS") or 1)
    )  # before vLLM replaces this function by a no-op
    # Reads the environment, once per process. A thread of gloo would do so at its first collective, while the
    # main thread's imports change the environment, and getenv beside setenv can end the process with SIGSEGV.
    torch.backends.cpu.get_cpu_capability()
    device, timeout = _take_device(), group_timeout(timeout_s)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        timeout=timeout,
        store=world_store(timeout.total_seconds()),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    _check_that_ranks_agree()
    # NCCL makes the world's communicator in its first operation, which needs all ranks. The first batch of
    # sends and receives runs between a few ranks (the weights of one mesh), and would wait for the other
    # ranks for ever: torch/distributed/distributed_c10d.py, `batch_isend_irecv`.
    dist.all_reduce(torch.zeros(1, device=device))


def _take_device() -> torch.device:
    """Make the GPU of this rank the current one and return it, or the CPU device if there is no GPU. Raises
    RuntimeError if there are too few GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local_rank >= count:
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "more")
        raise RuntimeError(
            f"every rank needs a GPU of its own, and {socket.gethostname()} has {count} for {ranks} ranks. "
            f"Try --nproc-per-node {count}."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _check_that_ranks_agree() -> None:
    """Raise RuntimeError if some ranks would build Transformer Engine's layers and others Megatron's own.

    The two differ in parameter names and rounding."""
    version = transformer_engine_version()
    where = f"on {socket.gethostname()}: {version or transformer_engine_problem()}"
    told = all_gather_messages((version is not None, where), tuple[bool, str])
    if len({uses for uses, _ in told}) > 1:
        first = {uses: f"rank {rank} {where}" for rank, (uses, where) in reversed(list(enumerate(told)))}
        raise RuntimeError(
            f"Transformer Engine must be usable on all ranks or on none: {first[True]}; {first[False]}. "
            "Install it where it is missing (pip install 'megarl[te]'), or uninstall it everywhere."
        )


def build_roles(
    config: TrainConfig, world_size: int, context: WorkerContext | None = None
) -> dict[str, object]:
    """Return name -> this rank's part of each role that it hosts. Models and engines are built later, when
    the driver calls setup().

    Collective over the world: process groups of all meshes are made here, in the same order on every rank.

    Args:
        context: what the rank offers to its roles; needed with --staleness above 0."""
    if trains_in_fp32(config):
        torch.set_float32_matmul_precision("highest")  # PyTorch's default, which NVIDIA's containers change
    meshes, store = role_meshes(config, world_size), SampleStore()
    offload_manager = OffloadManager(config.placement.offload_ahead_bytes)
    for role in training_data_roles(meshes):
        create_groups(meshes[role], group_timeout(config.placement.call_timeout_s))
    writers, roles = _checkpoint_writers(config, meshes), {}
    if config.algorithm.needs_rollout:
        roles["data"] = _data_role(config, meshes, store)
        for suffix, of_actor in configs_of_actors(config).items():
            roles |= _roles_of_actor(suffix, of_actor, meshes, store, offload_manager, context)
        if config.episodes.share_episodes:
            _share_episodes([role for name, role in roles.items() if kind_and_suffix(name)[0] == "rollout"])
    elif dist.get_rank() in meshes["actor"].ranks:
        roles |= _roles_without_rollout(config, meshes, store, offload_manager)
    if config.profile.profile and dist.get_rank() in config.profile.profile_ranks:
        from megarl.workers.profiler import ProfilerRole

        roles["profiler"] = ProfilerRole(config.profile.profile, dist.get_rank(), meshes)
    for name, writer in writers.items():
        roles[name].writer = writer
    return roles


def _share_episodes(rollouts: Sequence[RolloutRole]) -> None:
    """Let the engines of this rank, one of each actor, play in the same episodes."""
    from megarl.workers.shared_episodes import SharedEpisodes

    shared = SharedEpisodes()
    for rollout in rollouts:
        rollout.shared = shared


def _data_role(config: TrainConfig, meshes: Mapping[str, MeshSpec], store: SampleStore) -> DataRole:
    configs = configs_of_actors(config)
    keys = shard_keys(meshes, scores_untrained(configs))
    shapes = {suffix: ModelShape.load(of_actor.model.model) for suffix, of_actor in configs.items()}
    formats = {
        keys[f"actor{suffix}"]: {
            "routed_experts": (expert_dtype(shape.num_moe_experts), (shape.num_layers, shape.moe_router_topk))
        }
        for suffix, shape in shapes.items()
        if tells_experts(configs[suffix], shape)
    }
    vocab_sizes = {role: shapes[actor_suffix(role, meshes)].vocab_size for role in meshes}
    has_versions = config.streaming.staleness > 0
    wide = {
        keys[f"actor{suffix}"]: wide_formats(algorithm_of(of_actor), of_actor)
        for suffix, of_actor in configs.items()
    }
    return DataRole(store, meshes, keys, vocab_sizes, formats, has_versions, wide)


def _checkpoint_writers(config: TrainConfig, meshes: Mapping[str, MeshSpec]) -> dict[str, CheckpointWriter]:
    """Return role -> checkpoint writer for the roles of this rank that checkpoints hold, each with its own
    gloo process group.

    Collective over the world."""
    groups = {
        role: dist.new_group(list(meshes[role].ranks), backend="gloo", timeout=_WRITE_TIMEOUT)
        for role in checkpointed_roles(config, meshes)
    }
    return {
        role: CheckpointWriter(group)
        for role, group in groups.items()
        if dist.get_rank() in meshes[role].ranks
    }


def _roles_without_rollout(
    config: TrainConfig, meshes: Mapping[str, MeshSpec], store: SampleStore, offload_manager: OffloadManager
) -> dict[str, object]:
    """Return name -> role for a job whose samples are rows of the data. Actor and reference are on the same
    ranks."""
    from megarl.workers.preference import PreferenceActorRole
    from megarl.workers.reward_training import RewardTrainingRole
    from megarl.workers.sft import SFTActorRole

    shared = config, meshes, store, offload_manager
    of_pairs = RewardTrainingRole if config.algorithm.trains_scores else PreferenceActorRole
    cls = SFTActorRole if config.algorithm.row_needs == "response" else of_pairs
    actor = cls("actor", *shared)
    if "reference" not in meshes:
        return {"actor": actor}
    return {"actor": actor, "reference": _reference("reference", actor, *shared)}


def _reference(
    name: str,
    actor: ActorRole | None,
    config: TrainConfig,
    meshes: Mapping[str, MeshSpec],
    store: SampleStore,
    offload_manager: OffloadManager,
) -> ReferenceRole | AdapterlessReferenceRole:
    """Return the reference, which is the actor without its adapters where that is possible.

    Args:
        actor: the actor on this rank, if there is one."""
    # The routers of a mixture of experts keep their choices for the actor's updates, so they cannot serve the
    # reference too.
    is_dense = ModelShape.load(config.model.model).is_dense
    if actor is not None and config.lora.lora_rank and is_dense and config.model.reference_model is None:
        if meshes[name] == meshes[actor.name] and config.reference == config.actor:
            return AdapterlessReferenceRole(actor)
    return ReferenceRole(name, config, meshes, store, offload_manager)


def _roles_of_actor(
    suffix: str,
    config: TrainConfig,
    meshes: Mapping[str, MeshSpec],
    store: SampleStore,
    offload_manager: OffloadManager,
    context: WorkerContext | None,
) -> dict[str, object]:
    """Return name -> role for the roles of one actor (actor, reference, critic, rollout, ...) that are on
    this rank.

    Args:
        suffix, config: suffix and configuration of the actor."""
    from megarl.workers.reward import RewardRole
    from megarl.workers.rollout import RolloutRole

    here = {role for role, mesh in meshes.items() if dist.get_rank() in mesh.ranks}
    shared, roles = (config, meshes, store, offload_manager), {}
    actor, reference, critic, cost_critic, rollout, reward = (
        f"{kind}{suffix}" for kind in ("actor", "reference", "critic", "cost_critic", "rollout", "reward")
    )
    if actor in here:
        roles[actor] = ActorRole(actor, *shared)
    if reference in here:
        roles[reference] = _reference(reference, roles.get(actor), *shared)
    if critic in here:
        roles[critic] = CriticRole(critic, *shared)
    if cost_critic in here:
        roles[cost_critic] = CostCriticRole(cost_critic, *shared)
    for model in (f"{model.name}{suffix}" for model in reward_models(config)):
        if model in here:
            roles[model] = RewardModelRole(model, *shared)
    if rollout in here:
        roles[rollout], roles[reward] = RolloutRole(rollout, *shared), RewardRole(reward, *shared)
        roles[rollout].actor, roles[reward].rollout = roles.get(actor), roles[rollout]
        roles[rollout].context = context
    elif actor in here:
        roles[actor].rollout_mesh = meshes[rollout]
    return roles
