"""Define the base class of the roles that a rank hosts, with the role's name, mesh and sample store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist

from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec, scores_untrained, shard_keys
from megarl.config.schema import TrainConfig
from megarl.role_names import actor_suffix
from megarl.workers.offload_manager import OffloadManager
from megarl.workers.store import SampleStore


@dataclass(eq=False)
class HostedRole:
    """One rank's part of a role: its name, configuration, mesh (ranks and parallel sizes), and the rank's
    samples."""

    name: str
    """Name of the role; its mesh is meshes[name]."""
    config: TrainConfig
    """Configuration of the role's actor."""
    meshes: Mapping[str, MeshSpec]
    store: SampleStore
    """Samples of this rank."""
    offload_manager: OffloadManager
    """Offload manager of this rank's models."""

    def __post_init__(self) -> None:
        name, meshes = self.name, self.meshes
        self.suffix = actor_suffix(name, meshes)
        apart = scores_untrained({self.suffix: self.config})
        self.mesh, self.shard_key = meshes[name], shard_keys(meshes, apart)[name]
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    @cached_property
    def shape(self) -> ModelShape:
        """Sizes of the policy: layers, hidden size, heads and so on."""
        return ModelShape.load(self.config.model.model)
