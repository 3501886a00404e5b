"""One rank: joins the torch world, hosts its roles, runs the commands that the driver sends them."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.config.hf_config import ModelShape
from megarl.config.mesh import engine_mode, role_meshes
from megarl.config.schema import TrainConfig
from megarl.megatron.mesh import create_groups
from megarl.workers.actor import ActorRole, ReferenceRole
from megarl.workers.data_plane import DataPlane
from megarl.workers.mailbox import world_store


def join_world(timeout_s: float) -> None:
    """torch.distributed from torchrun's environment: gloo for CPU tensors, NCCL for CUDA tensors where there is a GPU."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # before vLLM replaces this function by a no-op
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(seconds=timeout_s),
                            store=world_store(timeout_s), rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))  # fmt: skip


def build_roles(config: TrainConfig, world_size: int) -> dict[str, object]:
    """This rank's roles, not yet set up: models and engines are built when the driver calls their setup().

    Collective over the world: process groups of all meshes are made here, in the same order everywhere."""
    rank, meshes, plane = dist.get_rank(), role_meshes(config, world_size), DataPlane()
    create_groups(meshes["actor"])
    shape = ModelShape.load(config.model.model)
    roles: dict[str, object] = {}
    if not config.algorithm.needs_rollout:
        from megarl.workers.sft import SFTActorRole

        return {"actor": SFTActorRole(config, shape, meshes["actor"], plane)} if rank in meshes["actor"].ranks else {}
    from megarl.workers.reward import RewardRole
    from megarl.workers.rollout import RolloutRole

    if rank in meshes["actor"].ranks:
        roles["actor"] = ActorRole(config, shape, meshes["actor"], plane)
    if "reference" in meshes and rank in meshes["reference"].ranks:
        roles["reference"] = ReferenceRole(config, shape, meshes["reference"], plane)
    if rank in meshes["rollout"].ranks:
        mode = engine_mode(config, world_size)
        roles["rollout"] = RolloutRole(config, shape, meshes["rollout"], plane, roles.get("actor"), meshes["actor"], mode)
        roles["reward"] = RewardRole(config, meshes["reward"], plane, roles["rollout"])
    elif "actor" in roles:
        roles["actor"].rollout_mesh = meshes["rollout"]
    return roles
