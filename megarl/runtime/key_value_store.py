"""Declare the methods of torch.distributed.Store that the runtime uses."""

from __future__ import annotations

from typing import Protocol


class KeyValueStore(Protocol):
    """Methods of torch's c10d store, over which the processes of a job exchange messages."""

    def set(self, key: str, value: str | bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
