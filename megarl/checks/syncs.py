"""Check that every weight sync can be planned.

A plan needs the atlases (sharding specs) of both sides, and a source for each element of every engine."""

from __future__ import annotations

from dataclasses import replace

from megarl.config.errors import Errors
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec, actor_meshes
from megarl.config.roles import configs_of_actors
from megarl.config.schema import TrainConfig
from megarl.reshard.megatron_atlas import megatron_atlases
from megarl.reshard.plan import make_plan
from megarl.reshard.vllm_atlas import TABLES, vllm_atlases


def sync_errors(config: TrainConfig, world_size: int) -> Errors:
    """Yield an error for each weight sync that cannot be planned, for a configuration without other errors.

    Layers of a kind are alike, so one layer of each kind is planned per model chunk."""
    for of_actor in configs_of_actors(config).values():
        meshes = actor_meshes(of_actor, world_size)
        shape = ModelShape.load(of_actor.model.model)
        if "rollout" in meshes and shape.model_type in TABLES:
            yield from _findings(shape, meshes["actor"], meshes["rollout"], of_actor.actor.qkv_layout)


def unplanned(config: TrainConfig) -> str | None:
    """Return the model_type whose engine layout is known only after the engine has started, or None."""
    if not config.algorithm.needs_rollout:
        return None
    types = [
        ModelShape.load(of_actor.model.model).model_type for of_actor in configs_of_actors(config).values()
    ]
    return next((name for name in types if name not in TABLES), None)


def _findings(shape: ModelShape, actor: MeshSpec, rollout: MeshSpec, qkv_layout: str) -> Errors:
    chunks = actor.pp * actor.vpp
    short = replace(shape, num_layers=chunks, dense_layers=(0,) if shape.dense_layers and chunks > 1 else ())
    try:
        make_plan(
            megatron_atlases(short, actor, qkv_layout=qkv_layout),
            vllm_atlases(short, rollout.ranks, rollout.tp),
        )
    except ValueError as error:  # a rule of the configuration should have reported this error
        yield (
            f"--tensor-model-parallel-size ({actor.tp}), --rollout-tensor-parallel-size "
            f"({rollout.tp}): no weight sync can be planned from one to "
            f"the other: {error} Try --tensor-model-parallel-size 1 --rollout-tensor-parallel-size 1."
        )
