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
_STOPPED_S = 2.0
"""A store that ends a wait so much later than it should was stopped meanwhile, with the driver that holds it (Ctrl-Z)."""


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
        self._stopped_s = 0.0  # how long reads of this sync waited for a store that was stopped
        self._own: dict[str, object] = {}
        self._keys_by_sync: deque[list[str]] = deque([[]])

    def write(self, key: str, value: object) -> None:
        """Publish a value of a declared type (megarl/messages.py) for all ranks, signed together with its
        key."""
        self._own[key] = value
        self._keys_by_sync[-1].append(key)
        if self._store is not None:
            self._store.set(key, sign(encode(value), f"{self._generation}/{key}"))

    def has_written(self, key: str) -> bool:
        """Return whether this rank has written a value of this key."""
        return key in self._own

    def read(self, key: str, kind: type[T], deadline: float) -> T:
        """Wait for the value of a key, and return it if its signature is that of this job.

        Args:
            kind: the declared type of the value.
            deadline: by time.monotonic(). It is later by the time that the store was stopped.
        Raises: Late; ForgedMessage for a value that another process wrote, which is not decoded."""
        if key in self._own:
            return self._own[key]
        while not self._wait(key, deadline):
            continue
        data = verify(self._store.get(key), f"{self._generation}/{key}")
        return decode(data, kind)

    def _wait(self, key: str, deadline: float) -> bool:
        """Wait for a key. Returns False if the store was stopped meanwhile, so that others could not write either.
        Raises: Late."""
        start = time.monotonic()
        left = max(deadline + self._stopped_s - start, 0.001)
        try:
            self._store.wait([key], timedelta(seconds=left))
        except RuntimeError as error:  # a file store raises this, other stores a DistStoreError
            if isinstance(error, dist.DistNetworkError):
                raise
            waited = time.monotonic() - start
            if waited < left + _STOPPED_S:
                raise Late(f"nobody wrote {key} within {left:.1f} s") from error
            self._stopped_s += waited
            return False
        return True

    def end_sync(self) -> None:
        """Remove the values that this rank wrote two syncs ago, which every rank has read.

        Call this between syncs."""
        self._stopped_s = 0.0
        self._keys_by_sync.append([])
        if len(self._keys_by_sync) > 3:
            for key in self._keys_by_sync.popleft():
                del self._own[key]
                if self._store is not None:
                    self._store.delete_key(key)
