"""Compute the mesh of a role (its ranks and their parallel sizes: tp, cp, dp, pp) and the coordinates of
ranks in it.

The order of ranks is Megatron's default: tp varies fastest, then cp, dp and pp. The experts of a mixture form
a second grid over the ranks of each pipeline stage: etp varies fastest, then ep and edp."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta

from megarl.config.reward_models import reward_models
from megarl.config.roles import Ranks, configs_of_actors, role_ranks
from megarl.config.schema import ParallelConfig, TrainConfig
from megarl.role_names import actor_suffix, kind_and_suffix

_DRIVER_FIRST_S = 60.0
"""Time that a rank waits longer than a call may take. The driver then reports first, and names the rank that
hangs."""


def group_timeout(call_timeout_s: float) -> timedelta:
    """Return the timeout of every process group of a job whose calls may take `call_timeout_s`."""
    return timedelta(seconds=call_timeout_s + _DRIVER_FIRST_S)


def replicas_fit(num_ranks: int, tp: int, cp: int = 1, pp: int = 1) -> bool:
    """Whether ranks can be split into data-parallel replicas (or engines) of tp x cp x pp ranks."""
    return num_ranks % (tp * cp * pp) == 0


def experts_fit(ranks_per_stage: int, ep: int, etp: int) -> bool:
    """Whether the ranks of a pipeline stage can be split into grids of ep x etp ranks."""
    return ranks_per_stage % (ep * etp) == 0


@dataclass(frozen=True)
class MeshSpec:
    """The ranks of a role and their parallel sizes. The data-parallel size follows from the others.

    `ranks[i]` has the coordinates of index i.

    Example: MeshSpec((0, 1, 2, 3), tp=2) is two data-parallel replicas, (0, 1) and (2, 3).

    Args:
        ep: number of ranks over which a layer's experts are spread.
        etp: number of ranks that split each expert. None: tp.
        cp: number of ranks that split each sequence. They hold the same weights and belong to one
            data-parallel replica.
        vpp: number of model chunks of each pipeline stage. It decides which layers a rank holds, and changes
            no group of ranks."""

    ranks: Ranks
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        sizes = {
            "tensor_model": self.tp,
            "pipeline_model": self.pp,
            "virtual_pipeline_model": self.vpp,
            "context": self.cp,
            "expert_model": self.ep,
            "expert_tensor": self.expert_tp,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}_parallel_size ({size}) must be at least 1.")
        if not replicas_fit(len(self.ranks), self.tp, self.cp, self.pp):
            raise ValueError(
                f"{len(self.ranks)} ranks cannot be split into tensor_model_parallel_size ({self.tp}) x "
                f"context_parallel_size ({self.cp}) x pipeline_model_parallel_size ({self.pp})"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"virtual_pipeline_model_parallel_size ({self.vpp}) needs "
                "pipeline_model_parallel_size above 1. Try 2."
            )
        if not experts_fit(self.ranks_per_stage, self.ep, self.expert_tp):
            raise ValueError(
                f"the {self.ranks_per_stage} ranks of a pipeline stage cannot be split into "
                f"expert_tensor_parallel_size ({self.expert_tp}) x expert_model_parallel_size ({self.ep})"
            )

    @property
    def dp(self) -> int:
        return len(self.ranks) // (self.tp * self.cp * self.pp)

    @property
    def ranks_per_stage(self) -> int:
        return len(self.ranks) // self.pp

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def shape(self) -> dict[str, int]:
        """Return the parallel sizes by name (tp, cp, dp, pp), the one that varies fastest over ranks
        first."""
        return {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}

    @property
    def expert_shape(self) -> dict[str, int]:
        """Return the parallel sizes of the experts' grid by name (etp, ep, edp, pp), in the same order."""
        return {
            "etp": self.expert_tp,
            "ep": self.ep,
            "edp": self.ranks_per_stage // (self.expert_tp * self.ep),
            "pp": self.pp,
        }

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank by name: tp, cp, dp and pp, and those in the experts' grid, etp,
        ep and edp."""
        index = self.ranks.index(rank)
        return _coordinates(index, self.shape) | _coordinates(index, self.expert_shape)

    def ranks_where(self, **fixed: int) -> Ranks:
        """Return the ranks whose coordinates match, e.g. ranks_where(dp=0): the first replica."""
        return tuple(r for r in self.ranks if fixed.items() <= self.coordinates(r).items())

    def peers(self, rank: int, *varied: str) -> Ranks:
        """Return the ranks that differ from `rank` at most in the varied coordinates of one grid: for "tp",
        its tensor-parallel group."""
        grid = self.shape if self.shape.keys() >= {*varied} else self.expert_shape
        mine = self.coordinates(rank)
        return self.ranks_where(**{name: mine[name] for name in grid if name not in varied})


def _coordinates(index: int, shape: dict[str, int]) -> dict[str, int]:
    out = {}
    for name, size in shape.items():
        out[name], index = index % size, index // size
    return out


def megatron_mesh(ranks: Ranks, parallel: ParallelConfig) -> MeshSpec:
    """Return the mesh of a role that Megatron runs, from its ranks and the sizes of its flags."""
    return MeshSpec(
        ranks,
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.expert_model_parallel_size,
        parallel.expert_tensor_parallel_size,
        parallel.context_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
    )


def scores_untrained(configs: Mapping[str, TrainConfig]) -> list[str]:
    """Return the suffixes of the actors, of suffix -> configuration, with samples that are only scored."""
    return [suffix for suffix, config in configs.items() if config.algorithm.greedy_samples]


def shard_keys(meshes: Mapping[str, MeshSpec], apart: Collection[str] = ()) -> dict[str, str]:
    """Return role -> key of its batch shards. Roles with the same key have the same samples on each rank.

    The key is the first role of the same actor on the same ranks with the same sizes. The sizes of experts
    and virtual pipelines do not count, because they do not change which rank has which sample. Every actor
    has separate columns, also of the same samples.

    Args:
        apart: suffixes of the actors whose reward models have batch shards of their own, because they score
            samples that no role trains on.

    Example: actor and reference on MeshSpec((0, 1), tp=2), critic on MeshSpec((0, 1)): actor and reference
    "actor", critic "critic"."""
    first: dict[tuple, str] = {}

    def shards(role: str, mesh: MeshSpec) -> tuple:
        suffix = actor_suffix(role, meshes)
        is_apart = suffix in apart and kind_and_suffix(role)[0] == "reward_model"
        return suffix, is_apart, mesh.ranks, *mesh.shape.items()

    return {role: first.setdefault(shards(role, mesh), role) for role, mesh in meshes.items()}


@functools.lru_cache(maxsize=64)
def replicas(mesh: MeshSpec, last_stage: bool = False) -> tuple[Ranks, ...]:
    """Return the ranks of each data-parallel replica: `mesh.ranks_where(dp=i)` for all i at once.

    Args:
        last_stage: whether to return only the ranks of the last pipeline stage."""
    blocks: list[list[int]] = [[] for _ in range(mesh.dp)]
    for index, rank in enumerate(mesh.ranks):
        at = _coordinates(index, mesh.shape)
        if not last_stage or at["pp"] == mesh.pp - 1:
            blocks[at["dp"]].append(rank)
    return tuple(map(tuple, blocks))


def role_meshes(config: TrainConfig, world_size: int) -> dict[str, MeshSpec]:
    """Return role -> mesh for all roles of the job, in the order of set-up: actor by actor."""
    return {
        f"{role}{suffix}": mesh
        for suffix, of_actor in configs_of_actors(config).items()
        for role, mesh in actor_meshes(of_actor, world_size).items()
    }


def actor_meshes(config: TrainConfig, world_size: int) -> dict[str, MeshSpec]:
    """Return role -> mesh for one actor's roles, without the actor's number in the names.

    Rule rewards score samples on the ranks that sampled them."""
    backend_of = {model.name: model.backend for model in reward_models(config)}
    meshes: dict[str, MeshSpec] = {}
    for role, ranks in role_ranks(config, world_size).items():
        if role == "rollout":
            meshes["rollout"] = meshes["reward"] = MeshSpec(ranks, config.rollout.tensor_parallel_size)
        elif backend_of.get(role) == "transformers":
            meshes[role] = MeshSpec(ranks)  # the whole model on each
        elif backend_of.get(role) == "judge":
            meshes[role] = MeshSpec(ranks, config.reward.tensor_model_parallel_size)
        else:
            meshes[role] = megatron_mesh(ranks, parallel_of(config, role))
    return meshes


def hosting_ranks(config: TrainConfig, world_size: int) -> dict[str, list[int]]:
    """Return role -> the ranks on which it runs.

    The role `data`, which moves samples and columns between meshes, is on all ranks. The role `profiler` is
    on the profiled ones."""
    ranks = {role: list(mesh.ranks) for role, mesh in role_meshes(config, world_size).items()}
    if config.algorithm.needs_rollout:
        ranks["data"] = list(range(world_size))
    if config.profile.profile:
        ranks["profiler"] = sorted(config.profile.profile_ranks)
    return ranks


def training_data_roles(meshes: Mapping[str, MeshSpec]) -> list[str]:
    """Return the roles that work on batch shards: all but the engines and the rule reward."""
    return [role for role in meshes if kind_and_suffix(role)[0] not in ("rollout", "reward")]


def parallel_of(config: TrainConfig, role: str) -> ParallelConfig:
    """Return the parallel sizes of a role that Megatron runs. All reward models have the same sizes, and both
    critics."""
    return getattr(config, kind_and_suffix(role)[0].removesuffix("_model").removeprefix("cost_"))


def engine_mode(config: TrainConfig, world_size: int) -> str:
    """Return where one actor's vLLM engines run: 'in-process' (in the workers) or 'out-of-process'."""
    if config.placement.rollout_engine != "auto":
        return config.placement.rollout_engine
    everywhere = role_ranks(config, world_size)["rollout"] == tuple(range(world_size))
    return "in-process" if everywhere and config.placement.num_actors == 1 else "out-of-process"
