"""What driver and workers write to each other, over torch's own c10d store.

    log    cmd/0, cmd/1, ...   one ordered list of commands. The driver writes, every rank reads all of it in order and skips
                               commands of roles it does not host: so ranks that share roles run them in the
                               same order.
    inbox  inbox               one queue of results and errors of all ranks; the driver takes them as they come.
    stacks stacks/wanted       set when a call hangs: every rank writes where its Python is to stacks/<rank>.
    kill   kill                set once the driver has reported a failure: nobody needs to wait for anything any more.
    stop   shutdown/...        what driver and ranks tell each other in a graceful shutdown, see shutdown_listener.py.

All keys live under a prefix with the elastic restart count, so a restarted job never reads those of the
attempt before. What is pickled is signed (`signing`): whoever reaches the store's port can write there.
The store refuses values above 8 MiB (`MAX_PAYLOAD_LEN` of TCPStoreLibUvBackend.cpp); larger ones are cut into
parts.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megarl.runtime import signing
from megarl.runtime.process import listen_on_loopback, store_prefix

PART_BYTES = 4 << 20
FOREVER = timedelta(days=20)  # the store's poll counts milliseconds in an int32: 24 days at most
SHUTDOWN = "shutdown"  # method of the command that ends the log; its role is ""
STARTUP = -1  # index of a result that answers no command: an error before the first one
TERMINATED = -2  # likewise: the rank has got SIGTERM
_WHOLE, _IN_PARTS = b"=", b"+"


@dataclass(frozen=True, slots=True)
class Command:
    """One call on a role. `arguments` is a pickled (args, kwargs), opaque to the ranks that skip it."""

    role: str
    ranks: tuple[int, ...]
    method: str
    step: int | None
    arguments: bytes


@dataclass(frozen=True, slots=True)
class Kill:
    """Ends the log when the job is over before its time. Workers exit with the driver's exit code."""

    exit_code: int


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a worker, as text: its class may not be importable in the driver."""

    role: str
    method: str
    step: int | None
    error: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException, role: str, method: str, step: int | None) -> Failure:
        last = "".join(traceback.format_exception_only(error)).strip()
        below = error.__traceback__.tb_next or error.__traceback__  # without the frame of the worker loop
        return cls(
            role, method, step, last, "".join(traceback.format_exception(type(error), error, below)).rstrip()
        )


@dataclass(frozen=True, slots=True)
class Result:
    """Answer of `rank` to command `index`, `seconds` after it began: a pickled value, or a failure."""

    index: int
    rank: int
    value: bytes
    seconds: float = 0.0
    ended: float = 0.0
    """time.time() of the rank."""
    failure: Failure | None = None


def connect(address: str | None = None, prefix: str | None = None, timeout_s: float = 300.0) -> dist.Store:
    """A new client connection to the job's store, at `address` ("host:port"; default: MASTER_ADDR and
    MASTER_PORT).

    Every thread that blocks on the store needs a connection of its own: a client lets one request through at
    a time. Where rank 0's own process hosts the store (no torchrun), call this after `init_process_group`.
    Raises DistNetworkError after `timeout_s`.
    """
    host, port = address.rsplit(":", 1) if address else (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    client = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    client.set_timeout(FOREVER)
    return dist.PrefixStore(store_prefix() if prefix is None else prefix, client)


def has_own_store() -> bool:
    """Whether the job has a store before its ranks have joined: torchrun's, or that of a driver which has
    started them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def world_store(timeout_s: float) -> dist.Store | None:
    """Store to hand to `init_process_group`, over which the ranks have agreed on the job's secret; None: its
    own is right. Before that, where all ranks are on one node, gloo and NCCL are told to stay on its loopback
    interface.

    In torch 2.13 torchrun keeps one store for all attempts and `init_process_group` no longer puts the
    attempt into its keys (`_create_c10d_store` says the store is new, `DynamicRendezvousHandler` reuses it),
    so after an elastic restart gloo would find the addresses of dead processes and time out.
    """
    if not has_own_store():
        signing.check_secret()
        return (
            dist.HashStore() if os.environ["WORLD_SIZE"] == "1" else None
        )  # torch's would listen on all interfaces, for nobody
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        listen_on_loopback()
    store = connect(prefix=f"{store_prefix()}/world", timeout_s=timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    signing.agree(store)
    return store


class Mailbox:
    """The protocol above over one connection. Not thread-safe while a call blocks."""

    def __init__(self, store: dist.Store):
        self._store = store

    # Driver side.

    def post(self, index: int, command: Command) -> list[str]:
        """Append a command to the log. Returns its keys, to be deleted once every rank has read it."""
        head, parts = self._pack(f"cmd/{index}", signing.dumps(command, f"cmd/{index}"))
        self._store.set(f"cmd/{index}", head)
        return [f"cmd/{index}", *parts]

    def receive(self) -> Result | None:
        """Block until some rank answers. None: `close` was called."""
        head = self._store.queue_pop("inbox")
        data = self._read(head)
        self.delete(json.loads(head[1:]) if head[:1] == _IN_PARTS else [])
        return signing.loads(data, "inbox")

    def close(self) -> None:
        """End a `receive` that blocks on another connection."""
        self._store.queue_push("inbox", _WHOLE + signing.dumps(None, "inbox"))

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            self._store.delete_key(key)

    def stacks(self, ranks: Sequence[int], wait_s: float) -> dict[int, str]:
        """Where the main thread of each of these ranks is, of those that say so in time."""
        self.ask_for_stacks()
        deadline, said = time.monotonic() + wait_s, {}
        while len(said) < len(ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
            new = [key for rank in ranks if rank not in said and self._store.check([key := f"stacks/{rank}"])]
            said |= {int(key.partition("/")[2]): signing.loads(self._store.get(key), key) for key in new}
        return said

    def ask_for_stacks(self) -> None:
        self._store.set("stacks/wanted", "1")

    def kill(self, index: int, exit_code: int) -> None:
        """End the job: workers that wait for command `index`, the next one, exit at once; failed ones stop
        waiting."""
        self._store.set("kill", "1")
        self._store.set(f"cmd/{index}", _WHOLE + signing.dumps(Kill(exit_code), f"cmd/{index}"))

    def ask_all(self, key: str, ranks: Sequence[int], wait_s: float, value: str = "asked") -> list[int]:
        """Set one of the keys of shutdown_listener.py. Returns the ranks that have not answered in time."""
        self._store.set(key, value)
        deadline, missing = time.monotonic() + wait_s, list(ranks)
        while (
            missing := [rank for rank in missing if not self._store.check([f"{key}/{rank}"])]
        ) and time.monotonic() < deadline:
            time.sleep(0.02)
        return missing

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def of_ranks(self, key: str, ranks: Sequence[int]) -> dict[int, str]:
        """What these ranks have set, of those that have."""
        return {
            rank: self._store.get(f"{key}/{rank}").decode()
            for rank in ranks
            if self._store.check([f"{key}/{rank}"])
        }

    # Worker side.

    def next_command(self, index: int) -> Command | Kill:
        """Block until command `index` is there."""
        return signing.loads(self._read(self._store.get(f"cmd/{index}")), f"cmd/{index}")

    def report(self, result: Result) -> None:
        head, _ = self._pack(f"result/{result.rank}/{result.index}", signing.dumps(result, "inbox"))
        self._store.queue_push("inbox", head)

    def tell_stack_when_asked(self, rank: int, describe: Callable[[], str]) -> None:
        """Block until the driver asks, then answer. On a thread and a connection of its own."""
        self._store.get("stacks/wanted")
        self._store.set(f"stacks/{rank}", signing.dumps(describe(), f"stacks/{rank}"))

    def is_killed(self) -> bool:
        """Return whether the driver has called `kill`."""
        return self._store.check(["kill"])

    # A value above PART_BYTES is a head with the keys of its parts, which are written before it.

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
