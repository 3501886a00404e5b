"""Run a step on all ranks of a group: it succeeds on all of them or fails on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
import torch.distributed as dist

from megarl.checkpoint.manifest import CheckpointError, CheckpointIOError
from megarl.collectives import all_gather_messages
from megarl.files.writing import MISSING

T = TypeVar("T")


class Outcome(msgspec.Struct, Generic[T], frozen=True):
    """Result of a step on one rank, or the error of the step there."""

    result: T | None = None
    error: str | None = None
    is_io: bool = False
    """Whether the error is the file system's, and not one of a file that is missing or damaged."""


class RankGroup:
    """The ranks of a process group; without torch.distributed this process alone.

    Args:
        group: the process group; None is the world."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group, self._alone = group, not dist.is_initialized()
        self.rank, self.size = (0, 1) if self._alone else (dist.get_rank(group), dist.get_world_size(group))

    def all(self, step: Callable[[], T], kind: type[T]) -> list[T]:
        """Run a step on every rank and return the results of all ranks.

        Args:
            kind: the declared type of the results (megarl/messages.py).
        Raises: CheckpointError, on every rank, if the step failed on any; CheckpointIOError for an error of
            the file system."""
        caught, own = None, Outcome()
        try:
            own = Outcome(result=step())
        except (OSError, ValueError) as error:
            is_io = isinstance(error, OSError | CheckpointIOError) and not isinstance(error, MISSING)
            caught, own = error, Outcome(error=str(error), is_io=is_io)
        outcomes = [own] if self._alone else all_gather_messages(own, Outcome[kind], self._group)
        failed = next((rank for rank, outcome in enumerate(outcomes) if outcome.error is not None), None)
        if failed is None:
            return [outcome.result for outcome in outcomes]
        # One cause is enough: the same error on every rank is reported without a rank.
        reason = outcomes[failed].error
        if self.size > 1 and any(outcome.error != reason for outcome in outcomes):
            reason = f"[rank {dist.get_global_rank(self._group or dist.group.WORLD, failed)}] {reason}"
        raise (CheckpointIOError if outcomes[failed].is_io else CheckpointError)(reason) from caught

    def first(self, step: Callable[[], T], kind: type[T]) -> T:
        """Run a step on the first rank, while the others wait, and return its result on every rank."""
        return self.all(lambda: step() if self.rank == 0 else None, kind)[0]
