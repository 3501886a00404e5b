"""Run a step on all ranks of a process group, so that all of them succeed or all of them fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megarl.checkpoint.manifest import CheckpointError

T = TypeVar("T")


class ProcessGroupHelper:
    """Run functions on the ranks of a process group; without torch.distributed, on this process alone.

    Args:
        group: None is the world."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group, self._alone = group, not dist.is_initialized()
        self.rank, self.size = (0, 1) if self._alone else (dist.get_rank(group), dist.get_world_size(group))

    def all(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return the result of each.

        Raises: CheckpointError, on every rank, if it failed on any."""
        result, error = None, None
        try:
            result = work()
        except (OSError, ValueError) as caught:
            error = caught
        outcomes = [(result, error and str(error))]
        if not self._alone:
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, (result, error and str(error)), group=self._group)
        # The first cause is reported, without its rank if all ranks have the same.
        failed = next(
            ((rank, reason) for rank, (_, reason) in enumerate(outcomes) if reason is not None), None
        )
        if failed is not None:
            same = self.size == 1 or all(reason == failed[1] for _, reason in outcomes)
            raise CheckpointError(
                failed[1]
                if same
                else f"[rank {dist.get_global_rank(self._group or dist.group.WORLD, failed[0])}] {failed[1]}"
            ) from error
        return [result for result, _ in outcomes]

    def first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank while the others wait; return its result on all of them."""
        return self.all(lambda: work() if self.rank == 0 else None)[0]
