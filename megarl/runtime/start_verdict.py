"""Agree under torchrun, between all nodes, on whether the job can start.

    rank 0 of the job          checks the configuration and the inputs, then `allow` or `refuse`
    every other rank           `await_start` before it joins the process group, or `refuse`
    the first rank of a node   `ending_if_refused` while it joins

If a rank ends with an error, torchrun ends the ranks of its own node; those of other nodes would wait in vain
for it to join. So a rank that cannot start writes the reason, signed, to the store that torchrun's agents
have before there is a process group.

torchrun also kills the ranks of a node as soon as one of them ends. So the first rank of each node speaks for
it, and the others wait to be killed."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.runtime import signing
from megarl.runtime.process import DRIVER_PID

if TYPE_CHECKING:
    from megarl.runtime.key_value_store import KeyValueStore

_ALLOWED, _REFUSED, _NODES_OVER = "start", "start/refused", "start/over"
_POLL_S, _CONNECTED_S = 0.5, 10.0
_HEARD_S = 30.0  # other ranks import torch, Megatron-Core and vLLM before they look
_KILLED_S = _HEARD_S + 10.0


def is_awaited() -> bool:
    """Return whether nodes wait for each other: several nodes under torchrun, whose agents share a store."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 and _is_under_torchrun()


def allow() -> None:
    """Tell all ranks that the job can start. Called by rank 0."""
    if is_awaited():
        _connect().set(_ALLOWED, _signed("", _ALLOWED))


def refuse(reason: str) -> None:
    """Tell all other nodes why the job cannot start. Called by every rank that has found it.

    Returns when all nodes have heard it, at most after 30 seconds: torchrun's store may end with the agent of
    this node."""
    if not _speaks_for_node() and _is_under_torchrun():
        time.sleep(_KILLED_S)
    if not is_awaited():
        return
    with contextlib.suppress(RuntimeError):  # torch's DistError: the agent that had the store has ended
        store = _connect()
        store.set(_REFUSED, _signed(f"node {socket.gethostname()}: {reason}", _REFUSED))
        _leave(store)


def await_start(timeout_s: float) -> bool:
    """Return whether the job can start; if not, the reason has been printed. Called by all ranks but 0.

    Args:
        timeout_s: seconds until the job is given up.
    """
    if not is_awaited():
        return True
    deadline = time.monotonic() + timeout_s
    try:
        store = _connect()
        while not (is_allowed := store.check([_ALLOWED])) and not store.check([_REFUSED]):
            if time.monotonic() >= deadline:
                return _give_up(f"rank 0 has not said within {timeout_s:.0f} s whether the job can start.")
            time.sleep(_POLL_S)
        if not is_allowed:
            _hear(store)
            return False
        signing.verify(store.get(_ALLOWED), _ALLOWED)
    except signing.ForgedMessage as error:
        return _give_up(str(error))
    except RuntimeError as error:  # torch's DistError
        tell(
            f"torchrun's store ended before rank 0 said whether the job can start: its node has the reason "
            f"({type(error).__name__})."
        )
        return False
    return True


@contextlib.contextmanager
def ending_if_refused() -> Iterator[None]:
    """End this process with code 2 if another node refuses the job while the block waits for all nodes."""
    if not is_awaited() or not _speaks_for_node():
        yield
        return
    is_over = threading.Event()

    def watch() -> None:
        with contextlib.suppress(RuntimeError):  # torch's DistError: the job is over, and says why itself
            store = _connect()
            while not is_over.wait(_POLL_S):
                if store.check([_REFUSED]):
                    _hear(store)
                    os._exit(2)

    threading.Thread(target=watch, name="watch_start", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _connect() -> KeyValueStore:
    from megarl.runtime.mailbox import connect

    store: KeyValueStore = connect(timeout_s=_CONNECTED_S)
    return store


def tell(reason: str) -> None:
    """Print the reason why the job cannot start, once per node."""
    if _speaks_for_node():
        sys.stderr.write(f"{reason}\n")
        sys.stderr.flush()


def _give_up(reason: str) -> bool:
    tell(reason)
    refuse(reason)
    return False


def _hear(store: KeyValueStore) -> None:
    """Print why another node has refused the job, and let that node end."""
    if not _speaks_for_node():
        time.sleep(_KILLED_S)
    try:
        tell(str(signing.verify(store.get(_REFUSED), _REFUSED), "utf-8"))
    except signing.ForgedMessage as error:
        tell(str(error))
    _leave(store)


def _leave(store: KeyValueStore) -> None:
    """Wait until all nodes know that the job does not start, so that the store lives until then."""
    nodes, deadline = int(os.environ["GROUP_WORLD_SIZE"]), time.monotonic() + _HEARD_S
    over = store.add(_NODES_OVER, 1)
    while over < nodes and time.monotonic() < deadline:
        time.sleep(0.1)
        over = store.add(_NODES_OVER, 0)


def _signed(text: str, key: str) -> bytes:
    try:
        return signing.sign(text.encode(), key)
    except signing.SecretError:  # others then hear that the secret is not the same on all nodes
        return bytes(64)


def _is_under_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and DRIVER_PID not in os.environ


def _speaks_for_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"
