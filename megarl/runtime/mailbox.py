"""Ask questions of the ranks, and answer them, over torch's own c10d store.

    commands/...        addresses of the driver and of the nodes' relays, over which commands and reports
                        travel, see relay.py
    health/0, ...       set when the driver asks for signs of life; each rank writes its Python stack to
                        health/0/<rank>
    kill                set once the driver has reported a failure: nobody needs to wait any more
    shutdown/...        messages of a graceful shutdown, see shutdown_listener.py

All keys live under a prefix with the elastic restart count, so a restarted job never reads keys of the
previous attempt. Answers with content are signed (signing.py), because anybody who reaches the store's port
can write there."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from megarl.runtime import signing
from megarl.runtime.key_value_store import KeyValueStore
from megarl.runtime.process import listen_on_loopback, store_prefix

FOREVER = timedelta(days=20)  # the store's poll counts milliseconds in an int32: 24 days at most
_END = b"end"


def connect(address: str | None = None, prefix: str | None = None, timeout_s: float = 300.0) -> dist.Store:
    """Return a new client connection to the job's c10d store, whose keys have the prefix of this attempt.

    Every thread that blocks on the store needs a separate connection, because a client sends one request at a
    time. If rank 0's own process hosts the store (no torchrun), call this after `init_process_group`.

    Args:
        address: "host:port"; default: MASTER_ADDR and MASTER_PORT.
    Raises: DistNetworkError after `timeout_s`.
    """
    host, port = address.rsplit(":", 1) if address else (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    client = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    client.set_timeout(FOREVER)
    return dist.PrefixStore(store_prefix() if prefix is None else prefix, client)


def wait_for(store: KeyValueStore, key: str) -> bytes:
    """Return the value of a key as soon as it is set, also after more days than one `get` may take.

    Raises: DistNetworkError, if the store is gone."""
    while True:
        with contextlib.suppress(dist.DistStoreError):  # FOREVER is over, and the job goes on
            return store.get(key)


def has_own_store() -> bool:
    """Return whether torchrun or a driver already provides a c10d store, before `init_process_group`.

    torchrun provides such a store, as does a driver that has started the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def world_store(timeout_s: float) -> dist.Store | None:
    """Return the store to pass to `init_process_group`, or None if its default store is right.

    The ranks have agreed on the job's secret over this store. If all ranks are on one node, gloo and NCCL are
    first restricted to its loopback interface.

    In torch 2.13 torchrun keeps one store for all attempts and `init_process_group` no longer puts the
    attempt into its keys. (`_create_c10d_store` says the store is new, `DynamicRendezvousHandler` reuses it.)
    After an elastic restart gloo would therefore find the addresses of dead processes and time out.
    """
    if not has_own_store():
        signing.check_secret()
        # for one rank torch's store would listen on all interfaces, without any use
        return dist.HashStore() if os.environ["WORLD_SIZE"] == "1" else None
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        listen_on_loopback()
    store = connect(prefix=f"{store_prefix()}/world", timeout_s=timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    signing.agree(store)
    return store


class Mailbox:
    """Asks and answers questions over one connection to the store. One thread at a time may block on it."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store

    # Driver side.

    def ask_health(self, number: int, ranks: Sequence[int], wait_s: float) -> dict[int, str]:
        """Ask these ranks for the stack of their main thread. Returns the stacks, by rank, that arrive within
        `wait_s` seconds.

        Args:
            number: number of the question, from 0."""
        key = f"health/{number}"
        self._store.set(key, "asked")
        return {
            rank: str(signing.verify(answer, f"{key}/{rank}"), "utf-8")
            for rank, answer in self.answers(key, ranks, wait_s).items()
        }

    def end_health(self, number: int) -> None:
        """Tell the ranks that no health question `number` or later will come, so that their threads may
        end."""
        self._store.set(f"health/{number}", _END)

    def kill(self) -> None:
        """Tell failed ranks that their failure was reported, so that they stop to wait."""
        self._store.set("kill", "1")

    def ask_all(self, key: str, ranks: Sequence[int], wait_s: float, value: str = "asked") -> list[int]:
        """Set a key that every rank answers (shutdown_listener.py). Returns the ranks that have not answered
        within `wait_s` seconds."""
        self._store.set(key, value)
        answered = self.answers(key, ranks, wait_s)
        return [rank for rank in ranks if rank not in answered]

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def answers(self, key: str, ranks: Sequence[int], wait_s: float = 0.0) -> dict[int, bytes]:
        """Return rank -> its answer to the key, for the ranks that answer within `wait_s` seconds."""
        deadline, found = time.monotonic() + wait_s, dict[int, bytes]()
        while True:
            for rank in ranks:
                if rank not in found and self._store.check([f"{key}/{rank}"]):
                    found[rank] = self._store.get(f"{key}/{rank}")
            if len(found) == len(ranks) or time.monotonic() >= deadline:
                return found
            time.sleep(0.02)

    # Worker side.

    def answer_health(self, rank: int, describe: Callable[[], str]) -> None:
        """Answer the driver's health questions with the result of `describe`, and return when the driver
        stops asking.

        Runs on a separate thread with a separate connection."""
        number = 0
        while wait_for(self._store, f"health/{number}") != _END:
            key = f"health/{number}/{rank}"
            self._store.set(key, signing.sign(describe().encode("utf-8", "backslashreplace"), key))
            number += 1

    def is_killed(self) -> bool:
        """Return whether the driver has called `kill`."""
        return self._store.check(["kill"])
