"""The copies of megarl.megatron.offload between two places of host memory: what leaves is freed, what comes
back lies elsewhere."""

from __future__ import annotations

import torch


class MovedStorages:
    """Stands in for `_Copies` on a CPU."""

    def __init__(self, arrived=lambda part: None) -> None:
        """arrived: is told of each part that comes back."""
        self._arrived = arrived
        self._host: dict[str, list[torch.Tensor]] = {}
        self._old: list[torch.Tensor] = []
        self.num_moves = 0

    def take(self, part, storages, keep) -> None:
        if keep:
            self._host[part] = [_as_bytes(storage).clone() for storage, _ in storages]
        for storage, _ in storages:
            storage.resize_(0)

    def give(self, part, storages, keep) -> None:
        for number, (storage, size) in enumerate(storages):
            self._old.append(
                torch.empty(max(size, 1), dtype=torch.uint8)
            )  # takes the place that has become free
            storage.resize_(size)
            content = _as_bytes(storage)
            content.fill_(0xFF)  # NaN, so that nobody lives on what is left in the memory
            content.copy_(self._host[part][number]) if keep else content.zero_()
        del self._old[:-100]
        self._arrived(part)
        self.num_moves += 1

    def await_arrival(self, part) -> None:
        pass

    def take_seconds(self) -> float:
        return 0.25


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
