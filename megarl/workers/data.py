"""The role `data`, on every rank: brings a step's samples to the meshes that work on them, and columns from
one mesh to another.

    distribute("actor", samples, plan_a)      every rank       rollouts -> plane.shares["actor"]
    distribute("critic", samples, plan_c)     every rank       rollouts -> plane.shares["critic"]
    exchange(["values"], "critic", "actor")   the last pipeline stages of both meshes

Each rank works out its own messages from the mini-batches of both meshes, which name every sample's
data-parallel rank."""

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
from megarl.workers.data_plane import DataPlane, Layout, Share
from megarl.workers.exchange import (
    Formats,
    MissingRowsError,
    bytes_per_token,
    collect_samples,
    move_rows,
)
from megarl.workers.implements import implements
from megarl.workers.random_state import RandomStateOfRank


@implements(Data)
class DataRole(RandomStateOfRank):
    def __init__(
        self,
        plane: DataPlane,
        meshes: Mapping[str, MeshSpec],
        share_keys: Mapping[str, str],
        vocab_sizes: Mapping[str, int],
        formats: Mapping[str, Formats] | None = None,
    ) -> None:
        """formats: share -> of further columns that the engines report and it gets. vocab_sizes: role -> of
        its model. meshes: of every role. share_keys: role -> share, which is the name of a role on the same
        mesh; see `config.mesh.share_keys`."""
        self.plane, self.vocab_sizes, self.formats = plane, vocab_sizes, formats or {}
        self.meshes = {key: meshes[key] for key in share_keys.values()}
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def distribute(
        self, share: str, samples: list[Sample], mini_batches: list[MiniBatch], rollouts: str = "train"
    ) -> dict[str, float]:
        """Bring the samples of `mini_batches` from the ranks that rolled them out to all ranks of the share's
        mesh, as a new share.

        Called by the ranks that hold samples, those of the mesh, and those that will exchange columns with it
        in this step; every rank of the job may.

        Args:
            samples: all of the step, with their holders.
            mini_batches: as planned for the mesh.
            rollouts: which of `DataPlane.rollouts` they are.
        Returns: what this rank received: batch/samples_moved, batch/bytes_moved.
        Raises: ValueError, before anything is sent, for a sample that nobody holds or that this rank should
            hold, and for a plan that does not fit the mesh. InvariantError if what arrives is not what the
            engines made."""
        mesh = self._mesh(share)
        destinations = self._ranks_of_samples(share, mini_batches, last_stage=False)
        holders = {s.sample_id: s.holders for s in samples}
        for sample in destinations:
            if not holders.get(sample):
                known = "no rank holds it" if sample in holders else "it is not among the samples of the step"
                raise ValueError(
                    f"[data rank {self.rank}] sample {sample} is wanted by {self._name(share)}, but {known}."
                )
        self.plane.shares.pop(share, None)  # the last step's, before there are two
        self.plane.layouts[share] = Layout(mini_batches, {s.sample_id: s.length for s in samples})
        lengths = self.plane.layouts[share].lengths
        wanted: list[int] = []
        if self.rank in mesh.ranks:
            dp_rank = mesh.coordinates(self.rank)["dp"]
            wanted = [sample for mini_batch in mini_batches for sample in mini_batch.samples_of(dp_rank)]
        route, formats = plan_route(self.rank, holders, destinations), self.formats.get(share, {})
        held = self.plane.pack(rollouts)
        written = None if held is None else self.plane.rollouts[rollouts].digests
        try:
            batch, digests = collect_samples(held, route, wanted, lengths, formats, written)
        except MissingRowsError as error:
            raise ValueError(f"[data rank {self.rank}] samples for {self._name(share)}: {error}.") from error
        if self.rank in mesh.ranks:
            digest_of = {s.sample_id: s.digest for s in samples}
            check_batch(batch, {sample: digest_of[sample] for sample in wanted}, self.vocab_sizes[share])
            check_digests(batch, digests, "that the engine reported for it")
            self.plane.shares[share] = Share(batch, mini_batches, digests)
        received = [sample for ids in route.incoming.values() for sample in ids]
        return {
            "batch/samples_moved": float(len(received)),
            "batch/bytes_moved": float(
                bytes_per_token([*SAMPLED_COLUMNS, *formats], formats) * sum(lengths[s] for s in received)
            ),
        }

    def exchange(self, columns: Sequence[str], source: str, destination: str) -> dict[str, float]:
        """Bring token columns from the share `source`, where the last pipeline stage of each sample's replica
        has them, to the last stage of the share `destination`. Called by these ranks; others may, and do
        nothing.

        Returns: batch/bytes_exchanged that this rank received.
        Raises: ValueError, before anything is sent, for a column that is none or that this rank should give
            and does not have, for a share that was not distributed here, and for shares of different samples.
            InvariantError if a sample gets other values than were written for it, or values of other
            tokens."""
        check_column_names(columns)
        if source == destination or not columns:
            return {}
        gives, takes = (_on_last_stage(self._mesh(share), self.rank) for share in (source, destination))
        if not gives and not takes:
            return {}
        source_layout, layout = (self._layout(share) for share in (source, destination))
        holders = self._ranks_of_samples(source, source_layout.mini_batches, last_stage=True)
        destinations = self._ranks_of_samples(destination, layout.mini_batches, last_stage=True)
        if lost := destinations.keys() - holders.keys():
            raise ValueError(
                f"[data rank {self.rank}] sample {min(lost)} is wanted by "
                f"{self._name(destination)}, but is not in "
                f"{self._name(source)}."
            )
        if source_layout.lengths != layout.lengths:
            raise ValueError(
                f"[data rank {self.rank}] {self._name(source)} and {self._name(destination)} were "
                "distributed for different "
                "samples. Distribute both in every step, on every rank that exchanges."
            )
        held = self.plane.shares[source] if gives else None
        own = self.plane.shares[destination] if takes else None
        route, wanted = (
            plan_route(self.rank, holders, destinations),
            [] if own is None else own.batch.sample_ids.tolist(),
        )
        try:
            moved = move_rows(
                held and held.batch,
                columns,
                route,
                wanted,
                layout.lengths,
                digests=held and held.digests_for(columns),
            )
        except MissingRowsError as error:
            raise ValueError(
                f"[data rank {self.rank}] {', '.join(columns)} from {self._name(source)} to "
                f"{self._name(destination)}: "
                f"{error}."
            ) from error
        if own is not None:
            try:
                own.take_columns(moved.columns, moved.digests)
            except InvariantError as error:
                raise InvariantError(
                    f"{', '.join(columns)} from {self._name(source)} to {self._name(destination)}: {error}"
                ) from error
        received = sum(layout.lengths[sample] for ids in route.incoming.values() for sample in ids)
        return {"batch/bytes_exchanged": float(bytes_per_token(columns) * received)}

    def _mesh(self, share: str) -> MeshSpec:
        if share not in self.meshes:
            raise ValueError(f"share ({share!r}) must be one of {', '.join(self.meshes)}.")
        return self.meshes[share]

    def _layout(self, share: str) -> Layout:
        if share not in self.plane.layouts:
            raise ValueError(
                f"[data rank {self.rank}] {self._name(share)} was not distributed yet as far as "
                "this rank knows. "
                "Call distribute on every rank that exchanges columns with it."
            )
        return self.plane.layouts[share]

    def _ranks_of_samples(
        self, share: str, mini_batches: list[MiniBatch], last_stage: bool
    ) -> dict[int, tuple[int, ...]]:
        try:
            return ranks_of_samples(mini_batches, replicas(self.meshes[share], last_stage))
        except ValueError as error:
            raise ValueError(f"[data rank {self.rank}] {self._name(share)}: {error}") from error

    def _name(self, share: str) -> str:
        mesh = self.meshes[share]
        sizes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
        return f"share '{share}' ({sizes} on ranks {' '.join(map(str, mesh.ranks))})"


def _on_last_stage(mesh: MeshSpec, rank: int) -> bool:
    return rank in mesh.ranks and mesh.coordinates(rank)["pp"] == mesh.pp - 1
