"""Small messages between the ranks of a sync, over torch's own c10d store: each is written once and read by name, with a deadline.

A store, and not a collective: one rank that is late or dead is named, and what the others can do afterwards is not harmed."""

from __future__ import annotations

import pickle
import time
from collections import deque
from datetime import timedelta

import torch.distributed as dist


class Late(TimeoutError):
    """Nobody wrote in time."""


class Board:
    """Notes of one generation of a weight sync. Use from one thread."""

    def __init__(self, generation: int = 0, store: dist.Store | None = None) -> None:
        """store: default: that of the process group of the world."""
        self._store = dist.PrefixStore(f"megarl_weights/{generation}", store or dist.distributed_c10d._get_default_store())
        self._own: deque[list[str]] = deque([[]])

    def write(self, name: str, value: object) -> None:
        self._store.set(name, pickle.dumps(value))
        self._own[-1].append(name)

    def read(self, name: str, deadline: float) -> object:
        """deadline: by time.monotonic(). Raises: Late."""
        left = max(deadline - time.monotonic(), 0.001)
        try:
            self._store.wait([name], timedelta(seconds=left))
        except dist.DistStoreError as error:
            raise Late(f"nobody wrote {name} within {left:.1f} s") from error
        return pickle.loads(self._store.get(name))

    def turn_page(self) -> None:
        """Between syncs: remove what this rank wrote two syncs ago, which everybody has read."""
        self._own.append([])
        if len(self._own) > 3:
            for name in self._own.popleft():
                self._store.delete_key(name)
