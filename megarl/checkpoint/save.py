"""Write a checkpoint, on all ranks of a mesh or in one process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.checkpoint.process_group import ProcessGroupHelper
from megarl.checkpoint.manifest import CheckpointError, Manifest, Part, StoredTensor, part_key
from megarl.checkpoint.rectangles import Box, Rectangle, tiling_problem
from megarl.checkpoint.tensor_file import Entry, write_tensors
from megarl.config.checkpoint_json import sync_folder

Offer = tuple[str, str, Box, tuple[int, ...], torch.dtype]
"""What a rank could write: (kind, name, box, shape, dtype)."""


@torch.no_grad()
def save(
    folder: str | os.PathLike,
    rectangles: Sequence[Rectangle],
    state: dict[str, object],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write what the ranks of a group hold together. Collective.

    When it returns `folder` is complete, or does not exist. A thread may call it while training goes on, with
    copies of the values and a process group that nothing else uses.

    Args:
        rectangles: those of this rank. A rectangle that several ranks have is written once. All together must
            cover every tensor.
        state: further values to save as JSON; the first rank's are saved.
    Raises: CheckpointError, on every rank, if the folder exists, a file cannot be written or an element is
        missing."""
    helper, folder = ProcessGroupHelper(group), Path(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    plan = SavePlan.of(rectangles, group)
    helper.first(lambda: start_folder(partial, folder))
    try:
        manifest = plan.write(partial, plan.chosen(rectangles), state, group)
        helper.first(lambda: publish(partial, folder, manifest))
    except CheckpointError:
        if helper.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


Writers = dict[tuple[str, str, Box], int]
"""(kind, name, box) -> rank."""


@dataclass(frozen=True)
class SavePlan:
    """The plan which rank of a group writes which rectangles. It holds while the ranks keep their rectangles.

    It is the same on every rank, except for `rank`."""

    rank: int
    offers: list[list[Offer]]
    writer_of: Writers

    @classmethod
    def of(cls, rectangles: Sequence[Rectangle], group: dist.ProcessGroup | None = None) -> SavePlan:
        """Make the plan for the rectangles of all ranks. Collective.

        Raises: CheckpointError, on every rank, if they do not cover every tensor."""
        helper = ProcessGroupHelper(group)
        offers = helper.all(lambda: [(r.kind, r.name, r.box, r.shape, r.values.dtype) for r in rectangles])
        return cls(helper.rank, offers, _choose_writers(offers))

    def chosen(self, rectangles: Sequence[Rectangle]) -> list[Rectangle]:
        """Return those of the rectangles that this rank writes."""
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
        written = ProcessGroupHelper(group).all(lambda: _write_files(folder, self.rank, chosen))
        return self._manifest({name: of for files in written for name, of in files.items()}, state)

    def _manifest(self, files: Mapping[str, tuple[int, str]], state: dict[str, object]) -> Manifest:
        tensors: dict[str, dict[str, StoredTensor]] = {}
        parts: dict[tuple[str, str], dict[Box, Part]] = {}
        for rank, of_rank in enumerate(self.offers):
            for kind, name, box, shape, dtype in of_rank:
                if self.writer_of[kind, name, box] == rank:
                    tensors.setdefault(kind, {})[name] = StoredTensor(dtype, shape, ())
                    parts.setdefault((kind, name), {})[box] = Part(file_name(kind, rank), box)
        for kind, of_kind in tensors.items():
            for name, tensor in of_kind.items():
                of_kind[name] = StoredTensor(
                    tensor.dtype, tensor.shape, tuple(part for _, part in sorted(parts[kind, name].items()))
                )
        return Manifest(dict(files), tensors, state)


def _choose_writers(offers: list[list[Offer]]) -> Writers:
    """Choose for every rectangle the rank that has the least to write so far.

    Raises: CheckpointError if the rectangles do not cover each tensor once."""
    ranks_with: dict[tuple[str, str, Box], list[int]] = {}
    boxes: dict[tuple[str, str], set[Box]] = {}
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    size_of: dict[tuple[str, str, Box], int] = {}
    for rank, of_rank in enumerate(offers):
        for kind, name, box, shape, dtype in of_rank:
            ranks_with.setdefault((kind, name, box), []).append(rank)
            boxes.setdefault((kind, name), set()).add(box)
            size_of[kind, name, box] = box.area * dtype.itemsize
            if shapes.setdefault((kind, name), shape) != shape:
                raise CheckpointError(
                    f"{kind} of {name}: ranks disagree about its shape, {shapes[kind, name]} and {shape}"
                )
    for (kind, name), shape in shapes.items():
        if problem := tiling_problem(shape, boxes[kind, name]):
            raise CheckpointError(f"{kind} of {name}: {problem}")
    load, writer_of = [0] * len(offers), {}
    for rectangle, ranks in sorted(
        ranks_with.items(), key=lambda item: (len(item[1]) > 1, -size_of[item[0]])
    ):  # with a choice: last, large ones first
        writer_of[rectangle] = min(ranks, key=load.__getitem__)
        load[writer_of[rectangle]] += size_of[rectangle]
    return writer_of


def file_name(kind: str, number: int) -> str:
    return f"{kind}-{number:05d}.safetensors"


def _write_files(folder: Path, rank: int, chosen: Sequence[Rectangle]) -> dict[str, tuple[int, str]]:
    """Write one file of each kind. Returns: name -> (bytes, SHA-256). Raises: CheckpointError naming the file."""
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
    """Create the empty folder to write into. Raises: CheckpointError if the final folder exists."""
    if folder.exists():
        raise CheckpointError(f"{folder} exists; a checkpoint never replaces one.")
    shutil.rmtree(partial, ignore_errors=True)  # of a job that ended while it wrote
    partial.mkdir(parents=True)


def publish(partial: Path, folder: Path, manifest: Manifest) -> None:
    """Write the manifest, then rename the partial folder to the final one."""
    manifest.check_sizes(partial)  # all files of all machines
    manifest.write(partial)
    sync_folder(partial)
    partial.rename(folder)
    sync_folder(folder.parent)
