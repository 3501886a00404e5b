"""Send samples to the ranks that train on them, and columns such as values from one role's ranks to
another's.

The role `data` is on every rank of a job that samples.

    distribute("actor", samples, plan_a)      every rank       rollouts -> batch shard of mesh "actor"
    distribute("critic", samples, plan_c)     every rank       rollouts -> batch shard of mesh "critic"
    exchange(["values"], "critic", "actor")   the last pipeline stages of both meshes
    release([7, 9])                           every rank       samples 7 and 9 are gone

A mesh is named by its shard key (`config.mesh.shard_keys`). Each rank works out its own messages from the
mini-batches of both meshes, which name every sample's data-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from megarl.batch import check_column_names
from megarl.config.mesh import MeshSpec, replicas
from megarl.batch_invariants import check_batch, check_digests
from megarl.flow.columns import SAMPLED_COLUMNS
from megarl.flow.job_roles import Data
from megarl.invariants import InvariantError
from megarl.packing import MiniBatch, Sample, plan_route, ranks_of_samples
from megarl.workers.exchange import (
    Formats,
    MissingRowsError,
    bytes_per_token,
    collect_samples,
    move_rows,
)
from megarl.workers.implements import implements
from megarl.workers.random_state import RandomStateOfRank
from megarl.workers.run_folder import RunFolderOfRank
from megarl.workers.store import BatchLayout, BatchShard, MissingSampleError, SampleStore


@implements(Data)
class DataRole(RandomStateOfRank, RunFolderOfRank):
    """Sends and receives, on one rank, the samples and columns that move between the ranks of different
    roles."""

    def __init__(
        self,
        store: SampleStore,
        meshes: Mapping[str, MeshSpec],
        shard_keys: Mapping[str, str],
        vocab_sizes: Mapping[str, int],
        formats: Mapping[str, Formats] | None = None,
        has_versions: bool = False,
        wide_formats: Mapping[str, Formats] | None = None,
    ) -> None:
        """Keep the meshes (the ranks of each role and their parallel sizes) between which samples will move.

        Args:
            meshes: mesh of every role.
            shard_keys: role -> shard key, see `config.mesh.shard_keys`.
            vocab_sizes: role -> vocabulary of its model.
            formats: shard key -> formats of the further columns that engines report for this mesh.
            wide_formats: shard key -> formats of computed columns with several numbers per token.
            has_versions: whether batches get the column weight_versions."""
        self.store, self.vocab_sizes, self.formats = store, vocab_sizes, formats or {}
        self.has_versions, self.wide_formats = has_versions, wide_formats or {}
        self.meshes = {key: meshes[key] for key in shard_keys.values()}
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def distribute(
        self, key: str, samples: list[Sample], mini_batches: list[MiniBatch], source: str = "train"
    ) -> dict[str, float]:
        """Send the samples of `mini_batches` from their owners to all ranks of a mesh, as its next batch.
        Returns how much this rank received, as metrics.

        The mesh's previous samples are released. The owners, the ranks of the mesh, and the ranks that will
        exchange columns with it must call this. Every other rank of the job may call it.

        Args:
            key: shard key of the mesh.
            samples: at least those of `mini_batches`, with their owners. If none of them is `trained`, they
                become the canaries that are scored beside the mesh's batch, which stays.
            mini_batches: as planned for the mesh.
            source: the rollout source of the samples.
        Returns: batch/samples_moved and batch/bytes_moved, which count the data that this rank received.
        Raises: ValueError, before anything is sent, for a sample without an owner and for a plan that does
        not fit the mesh. ValueError also for a sample that this rank should own but does not hold.
        InvariantError if the received samples are not those of the engines, or if the driver's record of a
        sample differs from its owner's."""
        mesh = self._mesh(key)
        destinations = self._ranks_of_samples(key, mini_batches, last_stage=False)
        owners = {s.sample_id: s.owners for s in samples}
        for sample in destinations:
            if not owners.get(sample):
                known = "no rank owns it" if sample in owners else "it is not among the samples of the step"
                raise ValueError(
                    f"[data rank {self.rank}] sample {sample} is wanted by {self._name(key)}, but {known}."
                )
        self.store.check_records(source, samples)
        are_canaries = samples and not any(s.trained for s in samples)
        stored = self.store.canaries_of(key) if are_canaries else key
        self.store.release_batch(stored)  # release the old batch before the new one takes memory
        layout = BatchLayout(source, mini_batches, {s.sample_id: s for s in samples})
        self.store.layouts[stored] = layout
        wanted: list[int] = []
        if self.rank in mesh.ranks:
            dp_rank = mesh.coordinates(self.rank)["dp"]
            wanted = [sample for mini_batch in mini_batches for sample in mini_batch.samples_of(dp_rank)]
        route, formats = plan_route(self.rank, owners, destinations), self.formats.get(key, {})
        try:
            held = self.store.source(source).blocks(route.reads(wanted))
            batch, digests = collect_samples(held, route, wanted, layout.lengths, formats)
        except (MissingSampleError, MissingRowsError) as error:
            raise ValueError(f"[data rank {self.rank}] samples for {self._name(key)}: {error}.") from error
        if self.rank in mesh.ranks:
            check_batch(batch, {s: layout.samples[s].digest for s in wanted}, self.vocab_sizes[key])
            check_digests(batch, digests, "that the engine reported for it")
            if self.has_versions:
                batch.set_versions([layout.samples[sample] for sample in wanted])
            self.store.set_batch(stored, BatchShard(batch, mini_batches, digests))
        received = [sample for ids in route.incoming.values() for sample in ids]
        num_tokens = sum(layout.lengths[sample] for sample in received)
        return {
            "batch/samples_moved": float(len(received)),
            "batch/bytes_moved": float(bytes_per_token([*SAMPLED_COLUMNS, *formats], formats) * num_tokens),
        }

    def exchange(self, columns: Sequence[str], source: str, destination: str) -> dict[str, float]:
        """Send token columns from the mesh `source` to the mesh `destination`. Returns how many bytes this
        rank received, as a metric.

        Columns go from the last pipeline stage of each sample's replica to the last stage of the destination.
        The ranks of these stages must call this. Other ranks may call it, and do nothing.

        Args:
            source, destination: shard keys.
        Returns: batch/bytes_exchanged that this rank received.
        Raises: ValueError, before anything is sent, for an unknown column and for a column that this rank
        should send but does not have. ValueError also for a mesh without a batch on this rank, and for
        batches of different samples. InvariantError if a sample gets other values than were written for it,
        or values of other tokens."""
        check_column_names(columns)
        if source == destination or not columns:
            return {}
        gives, takes = (_on_last_stage(self._mesh(key), self.rank) for key in (source, destination))
        if not gives and not takes:
            return {}
        source_layout, layout = (self._layout(key) for key in (source, destination))
        owners = self._ranks_of_samples(source, source_layout.mini_batches, last_stage=True)
        destinations = self._ranks_of_samples(destination, layout.mini_batches, last_stage=True)
        if lost := destinations.keys() - owners.keys():
            raise ValueError(
                f"[data rank {self.rank}] sample {min(lost)} is wanted by {self._name(destination)}, but is not "
                f"in {self._name(source)}."
            )
        if source_layout.lengths != layout.lengths:
            raise ValueError(
                f"[data rank {self.rank}] {self._name(source)} and {self._name(destination)} were distributed "
                "for different samples. Distribute both in every step, on every rank that exchanges."
            )
        formats = self.wide_formats.get(destination)
        what = f"{', '.join(columns)} from {self._name(source)} to {self._name(destination)}"
        route = plan_route(self.rank, owners, destinations)
        try:
            own = self.store.batch(destination) if takes else None
            wanted = [] if own is None else own.batch.sample_ids.tolist()
            held = self.store.mesh(source).blocks(route.reads(wanted))
            moved = move_rows(held, columns, route, wanted, layout.lengths, formats)
        except (MissingSampleError, MissingRowsError) as error:
            raise ValueError(f"[data rank {self.rank}] {what}: {error}.") from error
        if own is not None:
            try:
                own.take_columns(moved.columns, moved.digests)
            except InvariantError as error:
                raise InvariantError(f"{what}: {error}") from error
        received = sum(layout.lengths[sample] for ids in route.incoming.values() for sample in ids)
        return {"batch/bytes_exchanged": float(bytes_per_token(columns, formats) * received)}

    def release(self, sample_ids: Sequence[int], source: str = "train") -> None:
        """Free the memory of samples that were trained on: rollouts and computed columns. Samples that this
        rank does not hold are ignored."""
        rollouts = self.store.source(source)
        rollouts.release([sample for sample in sample_ids if sample in rollouts])
        for key, layout in self.store.layouts.items():
            of_mesh = self.store.mesh(key)
            held = [sample for sample in sample_ids if sample in of_mesh]
            if held and layout.source == source:
                self.store.release_batch(key, held)

    def _mesh(self, key: str) -> MeshSpec:
        if key not in self.meshes:
            raise ValueError(f"batch shard ({key!r}) must be one of {', '.join(self.meshes)}.")
        return self.meshes[key]

    def _layout(self, key: str) -> BatchLayout:
        if key not in self.store.layouts:
            raise ValueError(
                f"[data rank {self.rank}] {self._name(key)} was not distributed yet as far as this rank knows. "
                "Call distribute on every rank that exchanges columns with it."
            )
        return self.store.layouts[key]

    def _ranks_of_samples(
        self, key: str, mini_batches: list[MiniBatch], last_stage: bool
    ) -> dict[int, tuple[int, ...]]:
        try:
            return ranks_of_samples(mini_batches, replicas(self.meshes[key], last_stage))
        except ValueError as error:
            raise ValueError(f"[data rank {self.rank}] {self._name(key)}: {error}") from error

    def _name(self, key: str) -> str:
        mesh = self.meshes[key]
        sizes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
        return f"batch shard '{key}' ({sizes} on ranks {' '.join(map(str, mesh.ranks))})"


def _on_last_stage(mesh: MeshSpec, rank: int) -> bool:
    return rank in mesh.ranks and mesh.coordinates(rank)["pp"] == mesh.pp - 1
