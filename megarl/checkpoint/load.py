"""Read a checkpoint, by all ranks of a role together or by one process."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.checkpoint.manifest import CheckpointError, Manifest, StoredTensor, check_tensors
from megarl.checkpoint.rank_group import RankGroup
from megarl.checkpoint.rectangles import Box, Rectangle, matrix_size
from megarl.checkpoint.tensor_file import TensorFile
from megarl.config.hf_config import differences


class Checkpoint:
    """A checkpoint to read from, in any process.

    Raises: CheckpointError if the folder holds none, or files of it are missing or of another size."""

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = Path(folder)
        self.manifest = Manifest.read(self.folder)
        self._files: dict[str, TensorFile] = {}

    @property
    def state(self) -> dict[str, object]:
        return self.manifest.state

    def tensors(self, kind: str) -> dict[str, StoredTensor]:
        """Return Hugging Face name -> how the values of a kind (weights, exp_avg, ...) are stored; {} if
        there are none."""
        return self.manifest.tensors.get(kind, {})

    def files(self, kinds: Collection[str]) -> list[str]:
        """Return the names of the files that hold tensors of these kinds (weights, exp_avg, ...)."""
        return sorted(
            {part.file for kind in kinds for tensor in self.tensors(kind).values() for part in tensor.parts}
        )

    def read(self, kind: str, name: str, box: Box) -> Tensor:
        """Return the values of one kind in a box of a Hugging Face tensor, [rows, cols], in the dtype that
        was written."""
        stored = self.tensors(kind)[name]
        out = torch.empty(box.row_end - box.row_start, box.col_end - box.col_start, dtype=stored.dtype)
        self._fill(kind, name, box, out)
        return out

    @torch.no_grad()
    def fill(self, rectangles: Iterable[Rectangle]) -> None:
        """Copy the stored values into each rectangle's memory. Raises CheckpointError if elements are not
        stored."""
        for r in rectangles:
            self._fill(r.kind, r.name, r.box, r.values)

    def _fill(self, kind: str, name: str, box: Box, out: Tensor) -> None:
        stored, found = self.tensors(kind)[name], 0
        for part in stored.parts:
            if (shared := part.box.overlap(box)) is None:
                continue
            file = self._files.get(part.file) or self._files.setdefault(
                part.file, TensorFile(self.folder / part.file)
            )
            rows, cols = shared.within(part.box)
            values = file.read(stored.key(name, part), rows.start, rows.stop)[:, cols]
            out[shared.within(box)].copy_(values)
            found += shared.area
        if found != box.area:
            raise CheckpointError(
                f"{self.folder}: {kind} of {name} lacks {box.area - found} elements of {tuple(box)}."
            )

    def check(self, kind: str, sizes: dict[str, tuple[int, int]]) -> None:
        """Raise CheckpointError unless the stored tensors of a kind have exactly these names and sizes."""
        check_tensors(
            f"{kind} in {self.folder}",
            {name: matrix_size(t.shape) for name, t in self.tensors(kind).items()},
            sizes,
        )

    def check_model(self, model: Mapping[str, object]) -> None:
        """Raise CheckpointError if the tensors were saved for a model that computes something else, by its
        `function_fields`."""
        saved = self.state.get("model")
        if model and isinstance(saved, dict) and (different := differences(saved, model)):
            raise CheckpointError(f"{self.folder} is of another model: it has {', '.join(different)}.")


def load(
    folder: str | os.PathLike,
    rectangles: Sequence[Rectangle],
    group: dist.ProcessGroup | None = None,
    digests: bool = True,
    model: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Verify a checkpoint, and fill `rectangles`, parts of this rank's tensors, from it. Collective.

    Returns: the state beside the tensors that was saved (step, schedule, ...).
    Raises: CheckpointError, on every rank; unless a file changed meanwhile, nothing was written to then."""
    checkpoint = verify(folder, rectangles, group, digests, model)
    RankGroup(group).all(lambda: checkpoint.fill(rectangles), None)
    return checkpoint.state


def verify(
    folder: str | os.PathLike,
    rectangles: Sequence[Rectangle],
    group: dist.ProcessGroup | None = None,
    digests: bool = True,
    model: Mapping[str, object] | None = None,
) -> Checkpoint:
    """Return the checkpoint if it can fill the rectangles of every rank of a group, or raise CheckpointError
    on every rank. Collective.

    Every file is there and has its digest; each rank reads its share of the files. Of each kind that the
    ranks ask for, the checkpoint must have the tensors that they ask for and no others.

    Args:
        digests: False: they have just been checked.
        model: `function_fields` of the model that the tensors are for, which must be those that were saved.
    Raises: CheckpointError, on every rank."""
    ranks = RankGroup(group)
    own = {(r.kind, r.name, tuple(r.shape)) for r in rectangles}
    sizes: dict[str, dict[str, tuple[int, int]]] = {}
    for of_rank in ranks.all(lambda: own, set[tuple[str, str, tuple[int, ...]]]):
        for kind, name, shape in of_rank:
            sizes.setdefault(kind, {})[name] = matrix_size(shape)

    def check() -> Checkpoint:
        checkpoint = Checkpoint(folder)
        for kind, of_kind in sizes.items():
            checkpoint.check(kind, of_kind)
        checkpoint.check_model(model or {})
        if digests:
            checkpoint.manifest.check_digests(
                checkpoint.folder, checkpoint.files(sizes.keys())[ranks.rank :: ranks.size]
            )
        return checkpoint

    checked: list[Checkpoint] = []
    ranks.all(lambda: checked.append(check()), None)
    return checked[0]
