"""Exchange messages between driver and ranks over torch's own c10d store.

    cmd/0, cmd/1, ...   the log: one ordered list of commands. The driver writes; each rank reads all of it in
                        order and skips calls of roles that it does not host. Ranks that share roles therefore
                        run them in the same order
    inbox               one queue of the replies, failures and events of all ranks, which the driver reads
    health/0, ...       set when the driver asks for signs of life; each rank writes its Python stack to
                        health/0/<rank>
    kill                set once the driver has reported a failure: nobody needs to wait any more
    shutdown/...        messages of a graceful shutdown, see shutdown_listener.py

All keys live under a prefix with the elastic restart count, so a restarted job never reads keys of the
previous attempt. Messages (messages.py) are signed (signing.py), because anybody who reaches the store's port
can write there. The store refuses values above 8 MiB (`MAX_PAYLOAD_LEN` of TCPStoreLibUvBackend.cpp). Larger
values are split into parts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from megarl.runtime import signing
from megarl.runtime.key_value_store import KeyValueStore
from megarl.runtime.messages import Command, Kill, Report, decode_command, decode_report, encode
from megarl.runtime.process import listen_on_loopback, store_prefix

PART_BYTES = 4 << 20
FOREVER = timedelta(days=20)  # the store's poll counts milliseconds in an int32: 24 days at most
STARTUP = -1  # index of a failure before the first command
_WHOLE, _IN_PARTS = b"=", b"+"
_END = b"end"


def connect(address: str | None = None, prefix: str | None = None, timeout_s: float = 300.0) -> dist.Store:
    """Open a new client connection to the job's store.

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


def has_own_store() -> bool:
    """Return whether the job has a store before its ranks have joined.

    torchrun provides such a store, as does a driver that has started the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def world_store(timeout_s: float) -> dist.Store | None:
    """Return the store for `init_process_group`; None means that its default store is right.

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
    """The protocol of this module over one connection, which one thread at a time may block on."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store, self._reports = store, 0

    # Driver side.

    def post(self, index: int, command: Command) -> list[str]:
        """Append a command to the log.

        Returns its keys, which can be deleted once every rank has read them."""
        head, parts = self._pack(f"cmd/{index}", signing.sign(encode(command), f"cmd/{index}"))
        self._store.set(f"cmd/{index}", head)
        return [f"cmd/{index}", *parts]

    def receive(self) -> Report | None:
        """Block until some rank reports. Returns None if `close` was called."""
        head = self._store.queue_pop("inbox")
        data = signing.verify(self._read(head), "inbox")
        self.delete(json.loads(head[1:]) if head[:1] == _IN_PARTS else [])
        return decode_report(data) if data else None

    def close(self) -> None:
        """End a `receive` that blocks on another connection."""
        self._store.queue_push("inbox", _WHOLE + signing.sign(b"", "inbox"))

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            self._store.delete_key(key)

    def ask_health(self, number: int, ranks: Sequence[int], wait_s: float) -> dict[int, str]:
        """Return the stack of the main thread of each of these ranks that answers in time.

        Args:
            number: number of the question, from 0."""
        key = f"health/{number}"
        self._store.set(key, "asked")
        return {
            rank: str(signing.verify(answer, f"{key}/{rank}"), "utf-8")
            for rank, answer in self.answers(key, ranks, wait_s).items()
        }

    def end_health(self, number: int) -> None:
        """Tell the ranks that no question `number` or later will come."""
        self._store.set(f"health/{number}", _END)

    def kill(self, index: int, exit_code: int) -> None:
        """End the job at once.

        Workers that wait for command `index`, the next one, exit at once. Failed workers stop waiting."""
        self._store.set("kill", "1")
        self.post(index, Kill(exit_code))

    def ask_all(self, key: str, ranks: Sequence[int], wait_s: float, value: str = "asked") -> list[int]:
        """Set one of the keys of shutdown_listener.py. Returns the ranks that have not answered in time."""
        self._store.set(key, value)
        answered = self.answers(key, ranks, wait_s)
        return [rank for rank in ranks if rank not in answered]

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def answers(self, key: str, ranks: Sequence[int], wait_s: float = 0.0) -> dict[int, bytes]:
        """Return rank -> the value that it has set under the key, for the ranks that set one in time."""
        deadline, found = time.monotonic() + wait_s, dict[int, bytes]()
        while True:
            for rank in ranks:
                if rank not in found and self._store.check([f"{key}/{rank}"]):
                    found[rank] = self._store.get(f"{key}/{rank}")
            if len(found) == len(ranks) or time.monotonic() >= deadline:
                return found
            time.sleep(0.02)

    # Worker side.

    def has_command(self, index: int) -> bool:
        """Return whether command `index` has been posted."""
        return self._store.check([f"cmd/{index}"])

    def next_command(self, index: int) -> Command:
        """Return command `index`. Blocks until the command is posted."""
        head = self._store.get(f"cmd/{index}")
        return decode_command(signing.verify(self._read(head), f"cmd/{index}"))

    def report(self, report: Report) -> None:
        """Put a report into the driver's inbox. Reports of one connection arrive in their order."""
        data = signing.sign(encode(report), "inbox")
        head, _ = self._pack(f"report/{report.rank}/{self._reports}", data)
        self._reports += 1
        self._store.queue_push("inbox", head)

    def answer_health(self, rank: int, describe: Callable[[], str]) -> None:
        """Answer the driver's questions with the result of `describe`, until the driver stops asking.

        Runs on a separate thread with a separate connection."""
        number = 0
        while self._store.get(f"health/{number}") != _END:
            key = f"health/{number}/{rank}"
            self._store.set(key, signing.sign(describe().encode("utf-8", "backslashreplace"), key))
            number += 1

    def is_killed(self) -> bool:
        """Return whether the driver has called `kill`."""
        return self._store.check(["kill"])

    # A value above PART_BYTES is a head with the keys of its parts, which are written first.

    def _pack(self, key: str, data: bytes) -> tuple[bytes, list[str]]:
        if len(data) <= PART_BYTES:
            return _WHOLE + data, []
        parts = [f"{key}/part_{i}" for i in range(-(-len(data) // PART_BYTES))]
        for i, part in enumerate(parts):
            self._store.set(part, data[i * PART_BYTES : (i + 1) * PART_BYTES])
        return _IN_PARTS + json.dumps(parts).encode(), parts

    def _read(self, head: bytes) -> bytes:
        return (
            head[1:]
            if head[:1] == _WHOLE
            else b"".join(self._store.get(part) for part in json.loads(head[1:]))
        )
