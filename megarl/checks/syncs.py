"""Check that every weight sync can be planned: each element of an engine's weights needs a source on the
actor's ranks.

A plan also needs the atlases (sharding specs) of both sides."""

from __future__ import annotations

from dataclasses import replace

from megarl.config.errors import Errors
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec, actor_meshes
from megarl.config.roles import configs_of_actors
from megarl.config.schema import TrainConfig
from megarl.reshard.engine_atlas import engine_atlas, engine_atlases
from megarl.reshard.megatron_atlas import megatron_atlases
from megarl.reshard.plan import make_plan


def sync_errors(config: TrainConfig, world_size: int) -> Errors:
    """Yield an error for each weight sync that cannot be planned, for a configuration without other errors.

    Layers of a kind are alike, so one layer of each kind is planned per model chunk."""
    for of_actor in configs_of_actors(config).values():
        meshes = actor_meshes(of_actor, world_size)
        shape = ModelShape.load(of_actor.model.model)
        backend = of_actor.rollout.backend
        if "rollout" in meshes and engine_atlas(backend, shape) is not None:
            yield from _findings(
                shape, meshes["actor"], meshes["rollout"], of_actor.actor.qkv_layout, backend
            )


def unplanned(config: TrainConfig) -> str | None:
    """Return a model_type whose weight layout in its engine is known only after the engine has started, or
    None."""
    if not config.algorithm.needs_rollout:
        return None
    for of_actor in configs_of_actors(config).values():
        shape = ModelShape.load(of_actor.model.model)
        if engine_atlas(of_actor.rollout.backend, shape) is None:
            return shape.model_type
    return None


def _findings(shape: ModelShape, actor: MeshSpec, rollout: MeshSpec, qkv_layout: str, backend: str) -> Errors:
    chunks = actor.pp * actor.vpp
    short = replace(shape, num_layers=chunks, dense_layers=(0,) if shape.dense_layers and chunks > 1 else ())
    try:
        make_plan(
            megatron_atlases(short, actor, qkv_layout=qkv_layout),
            engine_atlases(backend, short, rollout.ranks, rollout.tp),
        )
    except ValueError as error:  # a rule of the configuration should have reported this error
        yield (
            f"--tensor-model-parallel-size ({actor.tp}), --rollout-tensor-parallel-size "
            f"({rollout.tp}): no weight sync can be planned from one to "
            f"the other: {error} Try --tensor-model-parallel-size 1 --rollout-tensor-parallel-size 1."
        )
