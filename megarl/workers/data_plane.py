"""What one rank holds of the current step. Roles in the same process share it; nothing in it passes through the driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from megarl.batch import Batch
from megarl.packing import MiniBatch
from megarl.workers.residence import Residence


@dataclass
class Rollouts:
    """Samples as the engine made them, before they are packed."""

    rows: list[int]
    """Dataset row of each sample."""
    sample_ids: list[int]
    prompts: list[list[int]]
    responses: list[list[int]]
    log_probs: list[list[float]]
    """Of the response tokens, under the distribution they were sampled from."""
    experts: list[torch.Tensor] | None = None
    """Of each sample [tokens, layers, topk], the experts that the engine sent its tokens to (--moe-routing-replay engine)."""

    @cached_property
    def packed(self) -> Batch:
        """All of it, with the column rollout_log_probs, and routed_experts if they are known. Made once, however many meshes the samples
        go to."""
        batch = Batch.from_samples(self.sample_ids, self.prompts, self.responses, self.log_probs)
        if self.experts is not None:
            batch.routed_experts = torch.cat(self.experts)
        return batch


@dataclass
class Share:
    """What one mesh has of a step on this rank."""

    batch: Batch
    """The samples of this rank's micro-batches, in their order."""
    mini_batches: list[MiniBatch]
    """Of all ranks of the mesh."""


@dataclass(frozen=True)
class Layout:
    """Where the samples of a step are in one share. Every rank that gives to the share or takes from it knows this; ids only."""

    mini_batches: list[MiniBatch]
    lengths: dict[int, int]
    """Sample id -> tokens."""


@dataclass
class DataPlane:
    residence: Residence = field(default_factory=Residence)
    rollouts: dict[str, Rollouts] = field(default_factory=dict)
    """By purpose and number of the rollout role: 'train', 'eval', 'train_2' of rollout_2."""
    shares: dict[str, Share] = field(default_factory=dict)
    """By share key, of the meshes that this rank is in."""
    layouts: dict[str, Layout] = field(default_factory=dict)
    """By share key, of all meshes."""

    def pack(self, purpose: str) -> Batch | None:
        """What this rank rolled out, with the column rollout_log_probs; None if it rolled out nothing."""
        own = self.rollouts.get(purpose)
        if own is None or not own.sample_ids:
            return None
        return own.packed
