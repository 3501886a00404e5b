"""Write a checkpoint, by all ranks of a role together or by one process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megarl.checkpoint.manifest import CheckpointError, Manifest, Part, StoredTensor, part_key
from megarl.checkpoint.rank_group import RankGroup
from megarl.checkpoint.rectangles import Box, Rectangle, tiling_problem
from megarl.checkpoint.tensor_file import Entry, write_tensors
from megarl.files.checkpoints import sync_folder


class Offer(NamedTuple):
    """A rectangle of a Hugging Face tensor that a rank holds and could write."""

    kind: str
    name: str
    box: Box
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """As in torch.<dtype>."""


@torch.no_grad()
def save(
    folder: str | os.PathLike,
    rectangles: Sequence[Rectangle],
    state: dict[str, object],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write what the ranks of a group hold together as one checkpoint, or raise CheckpointError on every
    rank. In either case `folder` is complete or not there.

    Collective.

    To go on training meanwhile: give it copies of the values, in a thread, with a group that nothing else
    uses.

    Args:
        rectangles: of this rank. The same rectangle of several ranks is written once. All together must cover
            every tensor.
        state: what else to remember, for JSON; the first rank's counts.
    Raises: CheckpointError, on every rank, if the folder exists, a file cannot be written or an element is
        missing."""
    ranks, folder = RankGroup(group), Path(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    plan = SavePlan.of(rectangles, group)
    ranks.first(lambda: start_folder(partial, folder), None)
    try:
        manifest = plan.write(partial, plan.chosen(rectangles), state, group)
        ranks.first(lambda: publish(partial, folder, manifest), None)
    except CheckpointError:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


Writers = dict[tuple[str, str, Box], int]
"""(kind, name, box) of a rectangle -> the rank that writes it."""


@dataclass(frozen=True)
class SavePlan:
    """The plan of which rank of a group writes what, valid as long as its ranks hold the same rectangles.

    It is the same on every rank, but for `rank`."""

    rank: int
    writer_of: Writers
    tensors: dict[str, dict[str, StoredTensor]]
    """What the checkpoint will hold: kind -> name -> tensor."""

    @classmethod
    def of(cls, rectangles: Sequence[Rectangle], group: dist.ProcessGroup | None = None) -> SavePlan:
        """Return the plan by which each rectangle is written once, by one of the ranks that hold it.
        Collective.

        Raises: CheckpointError, on every rank, if the rectangles do not cover every tensor."""
        ranks = RankGroup(group)
        own = [
            Offer(r.kind, r.name, r.box, tuple(r.shape), str(r.values.dtype).removeprefix("torch."))
            for r in rectangles
        ]
        return cls(ranks.rank, *_choose_writers(ranks.all(lambda: own, list[Offer])))

    def chosen(self, rectangles: Sequence[Rectangle]) -> list[Rectangle]:
        """Return the rectangles that this rank writes."""
        return [r for r in rectangles if self.writer_of[r.kind, r.name, r.box] == self.rank]

    def write(
        self,
        folder: Path,
        chosen: Sequence[Rectangle],
        state: dict[str, object],
        group: dist.ProcessGroup | None = None,
    ) -> Manifest:
        """Write all files but the manifest, and return the manifest on every rank. Collective.

        Raises: CheckpointError, on every rank."""
        written = RankGroup(group).all(
            lambda: _write_files(folder, self.rank, chosen), dict[str, tuple[int, str]]
        )
        return Manifest({name: of for files in written for name, of in files.items()}, self.tensors, state)


def _choose_writers(offers: list[list[Offer]]) -> tuple[Writers, dict[str, dict[str, StoredTensor]]]:
    """Return which rank writes each rectangle (of those that hold it, the one with the least to write so
    far), and the tensors of the checkpoint. Raises CheckpointError if the rectangles do not cover each tensor
    once."""
    holders: dict[tuple[str, str], dict[Box, list[int]]] = {}
    stored: dict[tuple[str, str], Offer] = {}
    for rank, of_rank in enumerate(offers):
        for offer in of_rank:
            key = offer.kind, offer.name
            holders.setdefault(key, {}).setdefault(offer.box, []).append(rank)
            if (first := stored.setdefault(key, offer)).shape != offer.shape:
                raise CheckpointError(
                    f"{offer.kind} of {offer.name}: ranks disagree about its shape, {first.shape} and "
                    f"{offer.shape}"
                )
    rectangles: list[tuple[list[int], int, tuple[str, str, Box]]] = []
    for (kind, name), boxes in holders.items():
        if problem := tiling_problem(stored[kind, name].shape, boxes):
            raise CheckpointError(f"{kind} of {name}: {problem}")
        itemsize = getattr(torch, stored[kind, name].dtype).itemsize
        rectangles += [(ranks, box.area * itemsize, (kind, name, box)) for box, ranks in boxes.items()]
    load, writer_of = [0] * len(offers), {}
    # Rectangles that several ranks hold come last, large ones first.
    for ranks, size, rectangle in sorted(rectangles, key=lambda r: (len(r[0]) > 1, -r[1])):
        writer_of[rectangle] = min(ranks, key=load.__getitem__)
        load[writer_of[rectangle]] += size
    tensors: dict[str, dict[str, StoredTensor]] = {}
    for (kind, name), offer in stored.items():
        boxes = sorted(holders[kind, name])
        parts = tuple(Part(file_name(kind, writer_of[kind, name, box]), box) for box in boxes)
        tensors.setdefault(kind, {})[name] = StoredTensor(getattr(torch, offer.dtype), offer.shape, parts)
    return writer_of, tensors


def file_name(kind: str, number: int) -> str:
    return f"{kind}-{number:05d}.safetensors"


def _write_files(folder: Path, rank: int, chosen: Sequence[Rectangle]) -> dict[str, tuple[int, str]]:
    """Write one file of each kind. Returns: name -> (bytes, SHA-256). Raises: CheckpointError naming the
    file."""
    mine: dict[str, dict[str, Entry]] = {}
    for r in chosen:
        key = part_key(r.name, r.shape, r.box)
        shape = (
            r.shape if key == r.name else (r.values.shape[0],) if len(r.shape) == 1 else tuple(r.values.shape)
        )
        mine.setdefault(r.kind, {})[key] = Entry(key, r.values.dtype, shape, lambda values=r.values: [values])
    written = {}
    for kind, entries in mine.items():
        name = file_name(kind, rank)
        try:
            written[name] = write_tensors(folder / name, list(entries.values()))
        except OSError as error:
            raise CheckpointError(str(error)) from error
    return written


def start_folder(partial: Path, folder: Path) -> None:
    """Create an empty folder to write into. Raises: CheckpointError if the final folder exists."""
    if folder.exists():
        raise CheckpointError(f"{folder} exists; a checkpoint never replaces one.")
    shutil.rmtree(partial, ignore_errors=True)  # of a job that ended while it wrote
    partial.mkdir(parents=True)


def publish(partial: Path, folder: Path, manifest: Manifest) -> None:
    """Write the manifest and rename the folder to its final name. Raises CheckpointError, before that, if a
    file is missing or cut short."""
    manifest.check_sizes(partial)  # all files of all machines
    manifest.write(partial)
    sync_folder(partial)
    partial.rename(folder)
    sync_folder(folder.parent)
