"""Write checkpoints of a role while it trains: a call copies this rank's part to host memory, and a thread
writes it."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl.checkpoint.rank_group import RankGroup
from megarl.checkpoint.rectangles import Rectangle
from megarl.checkpoint.save import SavePlan, publish
from megarl.files.checkpoints import MANIFEST, file_digest
from megarl.runtime.process import WRITES_CHECKPOINT

if TYPE_CHECKING:
    from megarl.megatron.trained_model import TrainedModel
    from megarl.reshard.atlas import Atlas


class CheckpointWriter:
    """Writes one rank's part of a role's checkpoints, one checkpoint at a time.

    Args:
        group: a gloo process group of the role's ranks. Only the writing threads use it, because they
            communicate while training continues."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._plan: SavePlan | None = None
        self._thread: threading.Thread | None = None
        self._digest: str | None = None
        self._error: BaseException | None = None

    def begin(self, folder: Path, model: TrainedModel, atlas: Atlas, state: dict[str, object]) -> None:
        """Copy this rank's part of a checkpoint into host memory, start a thread that writes it to `folder`,
        and return.

        Collective, after `written` has reported the previous checkpoint as complete. The model may change as
        soon as this returns. `folder` appears when the checkpoint is complete.

        Args:
            state: further values to save as JSON; the first rank's are saved."""
        from megarl.megatron.training_state import model_state, saved_rectangles

        rectangles = saved_rectangles(model, atlas)
        if self._plan is None:  # layouts last as long as the job
            self._plan = SavePlan.of(rectangles, self._group)
        state = model_state(model, self._group) | {"job": state}
        copies = [replace(r, values=_host_copy(r.values)) for r in self._plan.chosen(rectangles)]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._digest = self._error = None
        self._thread = threading.Thread(
            target=self._write, args=(folder, copies, state), name=WRITES_CHECKPOINT, daemon=True
        )
        self._thread.start()

    def written(self, wait: bool) -> str | None:
        """Return the SHA-256 of the checkpoint's manifest, the same on every rank, or None while it is not
        written. Raises CheckpointError if a rank failed."""
        if wait:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._digest

    def _write(self, folder: Path, copies: list[Rectangle], state: dict[str, object]) -> None:
        ranks, partial = RankGroup(self._group), folder.with_name(f".{folder.name}.partial")
        try:
            ranks.first(lambda: partial.mkdir(parents=True), None)
            manifest = self._plan.write(partial, copies, state, self._group)
            ranks.first(lambda: publish(partial, folder, manifest), None)
            self._digest = ranks.first(lambda: file_digest(folder / MANIFEST), str)
        except BaseException as error:  # thread boundary: `written` raises it
            self._error = error


def _host_copy(values: torch.Tensor) -> torch.Tensor:
    if values.device.type == "cpu":
        return values.clone()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
