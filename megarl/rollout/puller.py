"""Pull weights inside a vLLM process, on the orders of the rank that drives the engine."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from megarl.reshard.destination import Arrival, Destination
from megarl.reshard.plan import RectCopy
from megarl.reshard.receiver import ExportedPull, tensors_of
from megarl.rollout.double_buffer import DoubleBuffer


@dataclass(frozen=True)
class Order:
    """The message with which the rank that drives the engine starts the copy of one weight version to one
    engine rank."""

    arrivals: dict[int, Arrival]
    pulls: dict[int, ExportedPull]
    """Sources that are new or have moved."""
    plan: dict[int, tuple[RectCopy, ...]] | None = None
    """Source rank -> copies; sent only with the first order of a plan."""


@dataclass
class Outcome:
    """The result of the copies that an `Order` started."""

    problem: str | None = None
    bytes: int = 0


@dataclass
class _Buffer:
    """One copy of the engine's weights, and the exported memory of the ranks that it comes from."""

    tensors: dict[str, torch.Tensor]
    destination: Destination | None = None
    pulls: dict[int, ExportedPull] = field(default_factory=dict)


class Puller:
    """Copies new versions of the weights into this vLLM process.

    Args:
        rank: rank of this destination in the plan.
        tensors: live weights of the model.
        double_buffer: whether a thread writes a second copy, which `commit` switches to. Otherwise `begin`
            overwrites the live weights and returns when done.
        staged: names of tensors that do not generate themselves (the plain twins of packed experts). They
            need no second copy."""

    def __init__(
        self,
        rank: int,
        model: torch.nn.Module,
        tensors: dict[str, torch.Tensor],
        double_buffer: bool,
        staged: Collection[str] = (),
    ) -> None:
        self.rank = rank
        self._double = (
            DoubleBuffer(model, {name: view for name, view in tensors.items() if name not in staged})
            if double_buffer
            else None
        )
        self._front = _Buffer(tensors)
        self._back = (
            _Buffer(self._double.back | {name: tensors[name] for name in staged}) if self._double else None
        )
        self._thread: threading.Thread | None = None
        self.outcome = Outcome()

    def begin(self, order: Order) -> None:
        """Start to copy a version. Raises: RuntimeError while an earlier version is still being copied."""
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError(
                f"[rank {self.rank}] an earlier version is still being copied, after its sync was given up"
            )
        for buffer in filter(None, (self._front, self._back)):
            if order.plan is not None:
                buffer.destination, buffer.pulls = Destination(self.rank, order.plan, buffer.tensors), {}
            buffer.pulls |= order.pulls
        self.outcome = Outcome(problem=f"[rank {self.rank}] nothing was copied")
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        arguments = (self._back or self._front, order.arrivals, gpu)
        self._thread = threading.Thread(target=self._copy, args=arguments, name="pull_weights", daemon=True)
        self._thread.start()
        if self._double is None:
            self._thread.join()

    def _copy(self, buffer: _Buffer, arrivals: dict[int, Arrival], gpu: int | None) -> None:
        """Copy the weights, compare digests, and leave the result or the error in `outcome`. This runs on a
        separate thread, whose current device is initially 0.

        Args:
            gpu: the current device of the thread that called `begin`; None without GPUs."""
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            for source, pull in buffer.pulls.items():
                buffer.destination.pull_from(source, tensors_of(pull), pull[1])
            buffer.pulls = {}
            self.copy(buffer.destination)
            self.outcome = Outcome(buffer.destination.difference(arrivals), buffer.destination.bytes)
        except Exception as error:  # thread boundary: `wait` returns the error
            self.outcome = Outcome(f"[rank {self.rank}] {type(error).__name__}: {error}")

    def copy(self, destination: Destination) -> None:
        destination.pull()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def wait(self, timeout_s: float) -> Outcome:
        """Return the result of the copies, or an error if they are not done after timeout_s."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return Outcome(f"[rank {self.rank}] the engine was not done copying after {timeout_s:.1f} s")
        return self.outcome

    def commit(self) -> bool:
        """Make the copied weights those that generate if they are complete, and return whether they were."""
        if self.outcome.problem is not None:
            return False
        if self._double is not None:
            self._double.switch()
            self._front, self._back = self._back, self._front
        self.outcome = Outcome(problem=f"[rank {self.rank}] nothing was copied since the last commit")
        return True

    def give_up(self) -> None:
        """Mark the copied weights as unusable, so that `commit` returns False."""
        self.outcome = Outcome(problem=f"[rank {self.rank}] the sync was given up")
