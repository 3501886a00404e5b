"""One rank: joins the torch world, hosts its roles, runs the commands that the driver sends them."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec, engine_mode, role_meshes, share_keys, training_data_roles
from megarl.config.reward_models import reward_models
from megarl.config.schema import TrainConfig
from megarl.megatron.mesh import create_groups
from megarl.workers.actor import ActorRole, AdapterlessReferenceRole, ReferenceRole
from megarl.workers.critic import CriticRole
from megarl.workers.data import DataRole
from megarl.workers.data_plane import DataPlane
from megarl.workers.mailbox import world_store
from megarl.workers.reward_model import RewardModelRole


def join_world(timeout_s: float) -> None:
    """torch.distributed from torchrun's environment: gloo for CPU tensors, NCCL for CUDA tensors where there is a GPU.

    Does nothing in a process that has joined: one after the other, several jobs may run in a process of their only rank."""
    if dist.is_initialized():
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # before vLLM replaces this function by a no-op
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(seconds=timeout_s),
                            store=world_store(timeout_s), rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))  # fmt: skip


def build_roles(config: TrainConfig, world_size: int) -> dict[str, object]:
    """This rank's roles, not yet set up: models and engines are built when the driver calls their setup().

    Collective over the world: process groups of all meshes are made here, in the same order everywhere."""
    rank, meshes, plane = dist.get_rank(), role_meshes(config, world_size), DataPlane()
    for role in training_data_roles(meshes):
        create_groups(meshes[role])
    here = {role for role, mesh in meshes.items() if rank in mesh.ranks}
    shape = ModelShape.load(config.model.model)
    if not config.algorithm.needs_rollout:
        from megarl.workers.sft import SFTActorRole

        return {"actor": SFTActorRole("actor", config, shape, meshes, plane, config.optimizer)} if "actor" in here else {}
    roles: dict[str, object] = {"data": DataRole(plane, meshes, share_keys(meshes), shape.vocab_size)}
    if "actor" in here:
        roles["actor"] = ActorRole("actor", config, shape, meshes, plane, config.optimizer)
    if "reference" in here:
        as_the_actor = meshes["reference"] == meshes["actor"] and config.reference == config.actor
        roles["reference"] = (AdapterlessReferenceRole(roles["actor"]) if config.lora.lora_rank and as_the_actor
                              else ReferenceRole("reference", config, shape, meshes, plane, optimizer=None))  # fmt: skip
    if "critic" in here:
        critic_shape = ModelShape.load(config.model.critic_model or config.model.model, value_head=True)
        roles["critic"] = CriticRole("critic", config, critic_shape, meshes, plane)
    for model in reward_models(config):
        if model.name in here:
            roles[model.name] = RewardModelRole(config, model.name, meshes[model.name], plane, share_keys(meshes)[model.name])
    _add_rollout(roles, config, shape, meshes, plane, engine_mode(config, world_size), "rollout" in here)
    return roles


def _add_rollout(roles: dict[str, object], config: TrainConfig, shape: ModelShape, meshes: dict[str, MeshSpec], plane: DataPlane, mode: str,
                 here: bool) -> None:  # fmt: skip
    """The engine and the rules that score what it samples."""
    from megarl.workers.reward import RewardRole
    from megarl.workers.rollout import RolloutRole

    if here:
        roles["rollout"] = RolloutRole(config, shape, meshes["rollout"], plane, roles.get("actor"), meshes["actor"], mode)
        roles["reward"] = RewardRole(config, meshes["reward"], plane, roles["rollout"])
    elif "actor" in roles:
        roles["actor"].rollout_mesh = meshes["rollout"]
