"""Declare what a weight sync asks of an inference engine, and where it lets the engine pull weights from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from megarl.reshard.destination import Arrival
from megarl.reshard.plan import RectCopy
from megarl.reshard.transports.exported import Exported, open_exported

ExportedPull = tuple[Exported, tuple[RectCopy, ...] | None]
"""Location of a source's exported weights, and their arrangement if it differs from the plan."""
Pull = ExportedPull | tuple[dict[str, Tensor], None]
"""An ExportedPull, or tensors of this process."""


class Receiver(Protocol):
    """Interface of this rank's engine to a weight sync. The engine may hold several destinations (one per
    engine rank)."""

    process: str | None
    """Unique name of the process that holds the weights; None if it is this process."""
    device: str
    tensors: dict[int, dict[str, Tensor]]
    """Destination rank -> name -> [rows, cols] tensor of the right shape and dtype.

    These are the live tensors if they are in this process, else tensors of the meta device."""

    def begin(
        self,
        version: int,
        arrivals: dict[int, dict[int, Arrival]],
        pulls: dict[int, dict[int, Pull]],
        messages: Callable[[], object],
    ) -> None:
        """Start to copy a version of the weights.

        Args:
            arrivals: destination -> source -> the source's message.
            pulls: destination -> source -> memory to pull from, for sources that are new or have moved.
            messages: receives the weights that travel as messages, if the engine is in this process."""

    def verify(self, timeout_s: float) -> str | None:
        """Wait for the copies and compare the digests. Returns an error, or None."""

    def commit(self, version: int) -> None: ...

    def give_up(self) -> None: ...


def tensors_of(pull: Pull) -> dict[str, Tensor]:
    """Return the tensors that a pull reads. Tensors of another process are mapped."""
    return open_exported(pull[0]) if isinstance(pull[0], Exported) else pull[0]
