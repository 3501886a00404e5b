"""A role's mesh: a list of ranks and its parallel sizes. Pure arithmetic, so the driver can plan with it.

Rank order is Megatron's default, tp fastest, then dp, then pp."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.placement import parse_ranks
from megarl.config.schema import TrainConfig


@dataclass(frozen=True)
class MeshSpec:
    """Where a role lives. `ranks[i]` has the coordinates of index i; the data-parallel size is what is left.

    Example: MeshSpec((0, 1, 2, 3), tp=2) is two data-parallel replicas, (0, 1) and (2, 3)."""

    ranks: tuple[int, ...]
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if len(self.ranks) % (self.tp * self.pp):
            raise ValueError(f"{len(self.ranks)} ranks cannot be split into tensor_model_parallel_size ({self.tp}) x "
                             f"pipeline_model_parallel_size ({self.pp})")

    @property
    def dp(self) -> int:
        return len(self.ranks) // (self.tp * self.pp)

    @property
    def shape(self) -> dict[str, int]:
        """Sizes by name, fastest-varying first."""
        return {"tp": self.tp, "dp": self.dp, "pp": self.pp}

    def coordinates(self, rank: int) -> dict[str, int]:
        index, out = self.ranks.index(rank), {}
        for name, size in self.shape.items():
            out[name], index = index % size, index // size
        return out

    def ranks_where(self, **fixed: int) -> tuple[int, ...]:
        """Ranks whose coordinates match, e.g. ranks_where(dp=0): the model-parallel block of the first replica."""
        return tuple(r for r in self.ranks if fixed.items() <= self.coordinates(r).items())

    def peers(self, rank: int, *varied: str) -> tuple[int, ...]:
        """Ranks with the same coordinates as `rank`, except along the varied names."""
        return self.ranks_where(**{n: c for n, c in self.coordinates(rank).items() if n not in varied})


def role_meshes(config: TrainConfig, world_size: int) -> dict[str, MeshSpec]:
    """Every role of the job and where it lives, in the order in which they are set up.

    The reference shares the actor's mesh and is absent when no KL needs it; rewards are scored where samples are made."""
    placement, everyone = config.placement, tuple(range(world_size))
    actor_ranks = parse_ranks(placement.actor_ranks, world_size) if placement.actor_ranks else everyone
    actor = MeshSpec(tuple(actor_ranks), config.actor.tensor_model_parallel_size, config.actor.pipeline_model_parallel_size)
    meshes = {"actor": actor}
    if config.algorithm.needs_reference:
        meshes["reference"] = actor
    if config.algorithm.needs_rollout:
        rollout_ranks = parse_ranks(placement.rollout_ranks, world_size) if placement.rollout_ranks else everyone
        meshes["rollout"] = meshes["reward"] = MeshSpec(tuple(rollout_ranks), config.rollout.tensor_parallel_size)
    return meshes


def engine_mode(config: TrainConfig, world_size: int) -> str:
    """'in-process' or 'out-of-process': what --rollout-engine means on this many ranks."""
    if config.rollout.engine != "auto":
        return config.rollout.engine
    ranks = config.placement.rollout_ranks
    everywhere = ranks is None or parse_ranks(ranks, world_size) == tuple(range(world_size))
    return "in-process" if everywhere else "out-of-process"
