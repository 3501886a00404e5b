"""What one rank holds of the current step. Roles in the same process share it; nothing in it passes through
the driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from megarl.batch import Batch, MicroBatch
from megarl.batch_invariants import Digests, check_digests, digests_of
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
    """Of each sample [tokens, layers, topk], the experts that the engine sent its tokens to
    (--moe-routing-replay engine)."""
    num_before: int = 0
    """Samples of the step that other engines made and that come before these."""

    @cached_property
    def packed(self) -> Batch:
        """All of it, with the column rollout_log_probs, and routed_experts if they are known. Made once,
        however many meshes the samples go to."""
        batch = Batch.from_samples(self.sample_ids, self.prompts, self.responses, self.log_probs)
        if self.experts is not None:
            batch.routed_experts = torch.cat(self.experts)
        return batch

    @cached_property
    def digests(self) -> Digests:
        """Digests of the tokens and of every column of `packed`."""
        return digests_of(self.packed, ["tokens", *self.packed.columns])


@dataclass
class Share:
    """What one mesh has of a step on this rank."""

    batch: Batch
    """The samples of this rank's micro-batches, in their order."""
    mini_batches: list[MiniBatch]
    """Of all ranks of the mesh."""
    digests: Digests = field(default_factory=dict)
    """Digests of the tokens and columns, made when they were written. Whoever reads a column checks them."""

    def __post_init__(self) -> None:
        self.digests |= digests_of(self.batch, {"tokens", *self.batch.columns} - self.digests.keys())

    def set_column(self, name: str, column: torch.Tensor) -> None:
        """Store a token column as `Batch.set_column` does, bound to its samples from here on."""
        self.batch.set_column(name, column)
        self.digests |= digests_of(self.batch, [name])

    def take_columns(self, columns: Mapping[str, torch.Tensor], digests: Digests) -> None:
        """Store columns that come from another share, with the digests that they had there.

        Raises: InvariantError if they are not those that were written there, or not for the tokens that are
        here."""
        check_digests(self.batch, {"tokens": digests["tokens"]}, "that the columns were made of")
        for name, column in columns.items():
            self.batch.set_column(name, column)
        written = {name: digests[name] for name in columns}
        check_digests(self.batch, written)
        self.digests |= written

    def digests_for(self, columns: Iterable[str]) -> Digests:
        """Digests of the tokens and of these columns, of those that are there."""
        self.digests |= digests_of(
            self.batch, {name for name in columns if name in self.batch.columns} - self.digests.keys()
        )
        return {name: self.digests[name] for name in ("tokens", *columns) if name in self.digests}

    def micro_batch(self, sample_ids: Sequence[int]) -> MicroBatch:
        """The micro-batch of these samples. Raises: InvariantError if a sample no longer has the tokens or
        values written for it."""
        batch = self.batch.select_samples(sample_ids)
        check_digests(batch, self.digests)
        return MicroBatch.of(batch)


@dataclass(frozen=True)
class Layout:
    """Where the samples of a step are in one share. Every rank that gives to the share or takes from it knows
    this; ids only."""

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
