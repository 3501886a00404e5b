"""A key-value store for small messages between the ranks of a weight sync, over torch's own c10d store.

Each message is written once and read by its key, with a deadline. A store, unlike a collective, can name the
rank that is late or dead. The other ranks can also continue afterwards.

Every message carries an HMAC-SHA256 over its key and its content. A process that does not know the job's
secret therefore cannot make a rank copy weights from elsewhere."""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from megarl.messages import decode, encode
from megarl.runtime.signing import sign, verify

T = TypeVar("T")


class Late(TimeoutError):
    """Error of a key whose value nobody wrote in time."""


class KeyValueStore:
    """The messages between the ranks of a weight sync that follow one plan; `generation` names the plan. Use
    it from one thread."""

    def __init__(self, generation: str = "0", alone: bool = False) -> None:
        """Open the store. With `alone` all values stay in this process, because no other rank reads or
        writes."""
        self._store = (
            None
            if alone
            else dist.PrefixStore(f"megarl_weights/{generation}", dist.distributed_c10d._get_default_store())
        )
        self._generation = generation
        self._own: dict[str, object] = {}
        self._keys_by_sync: deque[list[str]] = deque([[]])

    def write(self, key: str, value: object) -> None:
        """Publish a value of a declared type (megarl/messages.py) for all ranks, signed together with its
        key."""
        self._own[key] = value
        self._keys_by_sync[-1].append(key)
        if self._store is not None:
            self._store.set(key, sign(encode(value), f"{self._generation}/{key}"))

    def read(self, key: str, kind: type[T], deadline: float) -> T:
        """Wait for the value of a key, and return it if its signature is that of this job.

        Args:
            kind: the declared type of the value.
            deadline: by time.monotonic().
        Raises: Late; ForgedMessage for a value that another process wrote, which is not decoded."""
        if key in self._own:
            return self._own[key]
        left = max(deadline - time.monotonic(), 0.001)
        try:
            self._store.wait([key], timedelta(seconds=left))
        except RuntimeError as error:  # a file store raises this, other stores a DistStoreError
            if isinstance(error, dist.DistNetworkError):
                raise
            raise Late(f"nobody wrote {key} within {left:.1f} s") from error
        data = verify(self._store.get(key), f"{self._generation}/{key}")
        return decode(data, kind)

    def end_sync(self) -> None:
        """Remove the values that this rank wrote two syncs ago, which every rank has read.

        Call this between syncs."""
        self._keys_by_sync.append([])
        if len(self._keys_by_sync) > 3:
            for key in self._keys_by_sync.popleft():
                del self._own[key]
                if self._store is not None:
                    self._store.delete_key(key)
