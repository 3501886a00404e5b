"""Hold the samples of a rank and their columns, found by sample id, in memory until they are released.

    store.source("train")    rollouts: samples of this rank's engine, with row, group and weight versions
    store.mesh("actor")      batch shards: samples that a mesh of this rank trains on, with the columns that
                             its roles compute

A rollout source is named by its purpose and the suffix of its role: "train", "eval", "train_2" of rollout_2.
A mesh is named by its shard key, see `config.mesh.shard_keys`. Sample ids are unique within a source and
within a mesh. Roles of one process share the store; none of its content passes through the driver.

Samples that come together stay together. A block is packed once, and readers get views by id. The memory of a
block is free when its last sample is released."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Generic, TypeVar

import torch

from megarl.batch import Batch, MicroBatch
from megarl.batch_invariants import Digests, check_digests, digests_of
from megarl.episodes.episode import EpisodeResult
from megarl.invariants import InvariantError
from megarl.packing import MiniBatch, Sample, branch_id, by_episode


class MissingSampleError(LookupError):
    """Raised when a sample is read that this rank does not hold: it was released, or it was never here."""


@dataclass(eq=False, slots=True)
class RolloutSample:
    """One sample as the engine made it: prompt, response, and the log-probs of the sampled tokens.

    In a multi-turn sample the response holds everything after the first prompt: the model's answers, and the
    environment's messages between them, which are its holes."""

    sample_id: int
    row: int
    """Row of the prompt in the data set."""
    group: int
    versions: list[int]
    """Version of the weights that sampled each token: the number of training steps before them."""
    prompt: list[int]
    response: list[int]
    log_probs: list[float]
    """Log-probs of the sampled tokens, under the sampling distribution."""
    truncated: bool = False
    """True if the response was cut at max_response_length."""
    experts: torch.Tensor | None = None
    """Experts of each token in the engine, [tokens, layers, topk] (--moe-routing-replay engine)."""
    digest: int | None = None
    """Digest of the tokens, see `megarl.invariants.digest`."""
    holes: tuple[tuple[int, int], ...] = ()
    """(start, end) in the response of the tokens that were not sampled. The last token always is."""
    trained: bool = True
    """False for a sample that is scored but not trained on."""
    episode: EpisodeResult | None = None
    """Reward and messages of the episode, with its first sample; None in single-turn sampling."""
    branch: int = 0
    """Number of the sample among those of its episode."""
    num_branches: int = 1
    """Number of samples of the episode."""

    @property
    def first_id(self) -> int:
        """Id of the first sample of the episode."""
        return self.sample_id - branch_id(0, self.branch)

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return len(self.response) - sum(end - start for start, end in self.holes)

    @property
    def version(self) -> int:
        """Version of the weights that sampled the first token."""
        return self.versions[0]

    @property
    def version_runs(self) -> tuple[tuple[int, int], ...]:
        """(version, number of consecutive tokens) of the response, as in `Sample`."""
        if self.versions.count(self.versions[0]) == len(self.versions):
            return ()
        return tuple((version, len([*tokens])) for version, tokens in groupby(self.versions))

    def record(self, owners: tuple[int, ...]) -> Sample:
        """Return the ids and lengths of this sample, which go to the driver in place of its tokens.

        Raises: InvariantError unless every sampled token has a version."""
        num_sampled = self.num_sampled
        if len(self.versions) != num_sampled:
            raise InvariantError(
                f"sample {self.sample_id} has {num_sampled} response tokens, and {len(self.versions)} "
                "versions of weights that sampled them"
            )
        return Sample(
            self.sample_id,
            len(self.prompt) + len(self.response),
            num_sampled,
            owners,
            self.truncated,
            self.digest,
            self.group,
            self.version,
            self.version_runs,
            self.trained,
            branch=self.branch,
            num_branches=self.num_branches,
        )


class PackedSamples:
    """Samples concatenated into one Batch, with a digest (hash) of each sample's rows in every column."""

    batch: Batch
    digests: Digests
    """Digests, computed when a column is written and compared when the column is read."""

    @property
    def sample_ids(self) -> list[int]:
        return self.batch.sample_ids.tolist()

    def digests_for(self, columns: Iterable[str]) -> Digests:
        """Return column -> sample id -> digest, for the tokens and for those of the named columns that
        exist."""
        names = ["tokens", *(name for name in columns if name in self.batch.columns)]
        self.digests |= digests_of(self.batch, [name for name in names if name not in self.digests])
        return {name: self.digests[name] for name in names}

    def forget(self, sample_ids: Iterable[int]) -> None:
        """Note that these samples were released, so that their memory may become free."""


class RolloutBlock(PackedSamples):
    """Rollouts of one `generate` call. They are concatenated to a Batch when the first of them is sent to
    other ranks."""

    def __init__(self, rollouts: Iterable[RolloutSample]) -> None:
        self.rollouts = {rollout.sample_id: rollout for rollout in rollouts}
        self.digests = {}

    @property
    def sample_ids(self) -> list[int]:
        return list(self.rollouts)

    @cached_property
    def batch(self) -> Batch:
        """The rollouts as one Batch, with the column rollout_log_probs, and routed_experts if the engine
        reports experts."""
        rollouts = list(self.rollouts.values())
        batch = Batch.from_samples(
            [r.sample_id for r in rollouts],
            [r.prompt for r in rollouts],
            [r.response for r in rollouts],
            [r.log_probs for r in rollouts],
            [r.holes for r in rollouts],
        )
        if any(r.experts is not None for r in rollouts):
            batch.routed_experts = torch.cat([r.experts for r in rollouts])
        return batch

    def forget(self, sample_ids: Iterable[int]) -> None:
        for sample in sample_ids:
            del self.rollouts[sample]


@dataclass(eq=False)
class BatchShard(PackedSamples):
    """This rank's part of a training batch: the samples of its forward passes, concatenated in that order."""

    batch: Batch
    mini_batches: list[MiniBatch]
    """Updates of all ranks of the mesh."""
    digests: Digests = field(default_factory=dict)
    released: int | None = None
    """The first released sample of the batch. From then on the batch cannot be trained on."""

    def __post_init__(self) -> None:
        self.digests |= digests_of(self.batch, {"tokens", *self.batch.columns} - self.digests.keys())

    def set_column(self, name: str, column: torch.Tensor) -> None:
        """Store a token column as `Batch.set_column` does, and compute its digest per sample, which later
        reads compare."""
        self.batch.set_column(name, column)
        self.digests |= digests_of(self.batch, [name])

    def take_columns(self, columns: Mapping[str, torch.Tensor], digests: Digests) -> None:
        """Store columns that were computed on other ranks. Raises InvariantError if their digests there do
        not fit the values or tokens here.

        Raises: InvariantError if the values are not those that were written there, or were computed for other
        tokens than the ones here."""
        check_digests(self.batch, {"tokens": digests["tokens"]}, "that the columns were made of")
        for name, column in columns.items():
            self.batch.set_column(name, column)
        written = {name: digests[name] for name in columns}
        check_digests(self.batch, written)
        self.digests |= written

    def micro_batch(self, sample_ids: Sequence[int]) -> MicroBatch:
        """Return the micro-batch of these samples. Raises InvariantError if a sample no longer has the tokens
        or values written for it."""
        batch = self.batch.select_samples(sample_ids)
        check_digests(batch, self.digests)
        return MicroBatch.of(batch)

    def forget(self, sample_ids: Iterable[int]) -> None:
        if self.released is None:
            self.released = next(iter(sample_ids), None)


@dataclass(frozen=True)
class BatchLayout:
    """The plan of which rank trains on which sample of a mesh's batch. Every rank that exchanges data with
    the mesh has it."""

    source: str
    """Rollout source of the samples."""
    mini_batches: list[MiniBatch]
    samples: dict[int, Sample]
    """Driver's records, by sample id."""

    @property
    def planned(self) -> list[Sample]:
        """Records of the samples of all mini-batches, on all ranks."""
        return [
            self.samples[sample]
            for mini_batch in self.mini_batches
            for dp_rank in range(len(mini_batch.micro_batches))
            for sample in mini_batch.samples_of(dp_rank)
        ]

    @cached_property
    def lengths(self) -> dict[int, int]:
        """Number of tokens of each sample."""
        return {sample.sample_id: sample.length for sample in self.samples.values()}

    @cached_property
    def episode_of(self) -> dict[int, int]:
        """Episode of each sample."""
        return {sample.sample_id: sample.episode for sample in self.samples.values()}

    @cached_property
    def has_branches(self) -> bool:
        """Whether an episode has several samples."""
        return any(sample.branch for sample in self.samples.values())

    @cached_property
    def episode_lengths(self) -> dict[int, int]:
        """Number of response tokens of each episode, in all of its samples."""
        episodes = by_episode(self.samples.values())
        return {episode: sum(s.response_length for s in of_one) for episode, of_one in episodes.items()}


Block = TypeVar("Block", bound=PackedSamples)


class SampleTable(Generic[Block]):
    """Finds samples by id, in the blocks (packed batches) that they came in.

    Example:
        table.add(RolloutBlock(rollouts))     add samples of an engine
        table.blocks([7, 9])                  the blocks with samples 7 and 9, to read or send them
        table.release([7])                    sample 7 cannot be read any more"""

    def __init__(self, name: str) -> None:
        """Create an empty table. `name` is what errors call its samples."""
        self.name = name
        self._block_of: dict[int, Block] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the sample ids, in the order in which they came."""
        return iter(self._block_of)

    def __contains__(self, sample_id: int) -> bool:
        return sample_id in self._block_of

    def add(self, block: Block) -> None:
        """Add the samples of a block. Raises: InvariantError for a sample that is already in the table."""
        ids = block.sample_ids
        for sample in ids:
            if sample in self._block_of:
                raise InvariantError(f"sample {sample} is already among the {self.name} of this rank")
        self._block_of |= dict.fromkeys(ids, block)

    def block(self, sample_id: int) -> Block:
        """Return the block with this sample. Raises: MissingSampleError for a sample that is not in the
        table."""
        if sample_id not in self._block_of:
            raise MissingSampleError(
                f"sample {sample_id} is not among the {self.name} of this rank: it was released, or never here"
            )
        return self._block_of[sample_id]

    def blocks(self, sample_ids: Iterable[int]) -> list[Block]:
        """Return the blocks with these samples, each block once. Raises MissingSampleError for a sample that
        is not in the table."""
        return list({id(block): block for block in map(self.block, sample_ids)}.values())

    def release(self, sample_ids: Iterable[int] | None = None) -> None:
        """Remove these samples, or all of them (None). Raises MissingSampleError, and removes none, if one is
        not in the table."""
        ids = list(self if sample_ids is None else sample_ids)
        ids_of: dict[int, list[int]] = {}
        blocks = [self.block(sample) for sample in ids]
        for sample, block in zip(ids, blocks, strict=True):
            ids_of.setdefault(id(block), []).append(sample)
            del self._block_of[sample]
        for block in {id(block): block for block in blocks}.values():
            block.forget(ids_of[id(block)])


class SampleStore:
    """All samples of one rank: those that its engine sampled, and those that its roles train on."""

    def __init__(self) -> None:
        self._sources: dict[str, SampleTable[RolloutBlock]] = {}
        self._meshes: dict[str, SampleTable[BatchShard]] = {}
        self._batches: dict[str, BatchShard] = {}
        self.layouts: dict[str, BatchLayout] = {}
        """Last batch of every mesh that this rank exchanges samples or columns with, by shard key."""

    def source(self, name: str) -> SampleTable[RolloutBlock]:
        """Return the table of the samples of one rollout source ("train", "eval", "train_2"); it is empty on
        a rank without engine."""
        if name not in self._sources:
            self._sources[name] = SampleTable(f"rollouts '{name}'")
        return self._sources[name]

    def rollouts(self, source: str, sample_ids: Iterable[int] | None = None) -> list[RolloutSample]:
        """Return the sampled rollouts with these ids, or all rollouts of the source in the order of arrival.

        Raises: MissingSampleError for a sample that is not held."""
        table = self.source(source)
        return [table.block(s).rollouts[s] for s in (table if sample_ids is None else sample_ids)]

    def check_records(self, source: str, samples: Iterable[Sample]) -> None:
        """Raise InvariantError if the driver's record of a sample made on this rank has another group, digest
        or other weight versions."""
        table = self.source(source)
        for sample in samples:
            if sample.sample_id not in table:
                continue
            made = table.block(sample.sample_id).rollouts[sample.sample_id]
            for name in ("group", "version", "version_runs", "digest", "branch", "num_branches"):
                if getattr(made, name) != getattr(sample, name):
                    raise InvariantError(
                        f"{name} of sample {sample.sample_id} is {getattr(made, name)} where it was sampled, and "
                        f"{getattr(sample, name)} in the driver"
                    )

    def mesh(self, key: str) -> SampleTable[BatchShard]:
        """Return the table of the samples that the roles with this shard key train on."""
        if key not in self._meshes:
            self._meshes[key] = SampleTable(f"samples of batch shard '{key}'")
        return self._meshes[key]

    def set_batch(self, key: str, shard: BatchShard) -> None:
        """Add a batch shard. The roles with this shard key (those on the same mesh) train on it from here
        on."""
        self.mesh(key).add(shard)
        self._batches[key] = shard

    @staticmethod
    def canaries_of(key: str) -> str:
        """Return the key of the batch shard that holds the canaries scored beside a batch."""
        return f"{key} canaries"

    def release_batch(self, key: str, sample_ids: Iterable[int] | None = None) -> None:
        """Free samples of a batch shard, or the whole shard (None). Raises: MissingSampleError for a sample
        that is not there."""
        table = self.mesh(key)
        table.release(sample_ids)
        if not len(table):
            self._batches.pop(key, None)

    def batch(self, key: str) -> BatchShard:
        """Return the batch shard that the roles with this shard key train on. Raises MissingSampleError if
        it, or one of its samples, was released.

        Raises: MissingSampleError if there is none, or if one of its samples was released."""
        if key not in self._batches:
            raise MissingSampleError(
                f"there is no batch shard '{key}' on this rank: none was distributed, or all of it was released"
            )
        shard = self._batches[key]
        if shard.released is not None:
            self.mesh(key).block(shard.released)
        return shard
