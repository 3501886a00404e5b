"""Small messages between the ranks of a sync, over torch's own c10d store: each is written once and read by
name, with a deadline.

A store, and not a collective: one rank that is late or dead is named, and what the others can do afterwards
is not harmed."""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta

import torch.distributed as dist

from megarl.runtime import signing


class Late(TimeoutError):
    """Nobody wrote in time."""


class Board:
    """Notes of one generation of a weight sync. Use from one thread."""

    def __init__(self, generation: str = "0", alone: bool = False) -> None:
        """alone: nobody else reads or writes."""
        self._store = (
            None
            if alone
            else dist.PrefixStore(f"megarl_weights/{generation}", dist.distributed_c10d._get_default_store())
        )
        self._generation = generation
        self._own: dict[str, object] = {}
        self._pages: deque[list[str]] = deque([[]])

    def write(self, name: str, value: object) -> None:
        self._own[name] = value
        self._pages[-1].append(name)
        if self._store is not None:
            self._store.set(name, signing.dumps(value, f"{self._generation}/{name}"))

    def read(self, name: str, deadline: float) -> object:
        """deadline: by time.monotonic(). Raises: Late."""
        if name in self._own:
            return self._own[name]
        left = max(deadline - time.monotonic(), 0.001)
        try:
            self._store.wait([name], timedelta(seconds=left))
        except RuntimeError as error:  # of a file store; of others a DistStoreError
            if isinstance(error, dist.DistNetworkError):
                raise
            raise Late(f"nobody wrote {name} within {left:.1f} s") from error
        return signing.loads(self._store.get(name), f"{self._generation}/{name}")

    def turn_page(self) -> None:
        """Between syncs: remove what this rank wrote two syncs ago, which everybody has read."""
        self._pages.append([])
        if len(self._pages) > 3:
            for name in self._pages.popleft():
                del self._own[name]
                if self._store is not None:
                    self._store.delete_key(name)
