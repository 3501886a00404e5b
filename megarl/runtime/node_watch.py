"""Notice that a node of a job is lost, from the driver, and name it with its ranks.

    driver        NodeWatch: listens; an idle connection from each node, which the kernel watches
      |-- node 0  node_watch_process.py, started by the first rank of the node
      `-- node 1  ...

A process on each node holds the connection, and the kernels keep it alive (keep_alive.py). No rank's
interpreter takes part: native code may hold its lock for as long as it wants. A node whose processes are all
killed closes the connection at once. A node that is cut off does not answer the kernel's probes; it ends its
ranks after the same time, so that nothing of an attempt goes on that was given up elsewhere."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megarl.runtime import signing
from megarl.runtime.acceptor import SIGN_IN_S, Acceptor
from megarl.runtime.keep_alive import KeepAlive, is_cut
from megarl.runtime.key_value_store import KeyValueStore
from megarl.runtime.process import NUM_NODES

logger = logging.getLogger(__name__)
WATCH_KEY = "watch/address"
"""Key of the job's store with the address of the driver's NodeWatch."""
ACCEPTED, RANK_ENDS, RANK_ENDED = b"+", b"?%d", b"-%d"
"""Messages to and from a node: its connection is accepted; a rank of it ends; it has ended and said nothing."""
LAST_WORDS_S = 2.0
"""Seconds between the two, for what the rank or its agent says. A node that is killed closes the connection."""
CHALLENGE_BYTES, _MOST_BYTES, _TICK_S = 16, 1 << 16, 1.0
_RANK = re.compile(rb"([?-])(\d{1,9})")


@dataclass(frozen=True)
class Node:
    """A node of a job: its host name and its ranks in the world."""

    name: str
    ranks: tuple[int, ...]


@dataclass
class _Connection:
    """A connection from a node, which has no `node` until its first message was verified."""

    challenge: bytes = field(default_factory=lambda: secrets.token_bytes(CHALLENGE_BYTES))
    read: bytes = b""
    node: Node | None = None


class NodeWatch:
    """Listens for the nodes of a job on a thread of this process, and reports those that are lost.

    Args:
        address: IP address of this machine by which the nodes reach it.
        on_lost: called on another thread with a node that is lost, and with the reason in words.
        on_rank_ended: called there with a node and its rank that has ended and has said nothing.
        keep_alive: when a silent node counts as lost.
        on_rank_ends: called `LAST_WORDS_S` seconds before `on_rank_ended`."""

    def __init__(
        self,
        address: str,
        on_lost: Callable[[Node, str], object],
        on_rank_ended: Callable[[Node, int], object],
        keep_alive: KeepAlive = KeepAlive(),
        on_rank_ends: Callable[[Node, int], object] = lambda node, rank: None,
    ) -> None:
        self._on_lost, self._on_rank = on_lost, {b"?": on_rank_ends, b"-": on_rank_ended}
        self._keep_alive, self._is_closed = keep_alive, False
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self.address = f"{address}:{self._listener.getsockname()[1]}"
        """host:port, for the processes of the nodes."""
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(self._selector, self._listener)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, float] = {}
        """Connections that have not signed in, in the order of their beginning -> time at which they are
        closed."""
        self._thread = threading.Thread(target=self._run, name="watch_nodes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reporting lost nodes, and close all connections. Then the watch processes of the nodes end.

        May be called again, also after a call that a signal has interrupted."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # the thread has ended
            self._wake.sendall(b".")
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            retry_s = self._acceptor.retry_s
            for key, _ in self._selector.select(_TICK_S if retry_s is None and self._strangers else retry_s):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Connection):
                    assert isinstance(key.fileobj, socket.socket)
                    self._take(key.fileobj, key.data)
            self._drop_strangers()
        for key in [*self._selector.get_map().values()]:
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._acceptor.close()
        self._selector.close()
        self._wake.close()

    def _drop_strangers(self) -> None:
        """Close the connections that have not signed in for too long."""
        now = time.monotonic()
        while self._strangers and now > next(iter(self._strangers.values())):
            self._drop(next(iter(self._strangers)))

    def _accept(self) -> None:
        if (connection := self._acceptor.accept()) is None:
            return
        new = _Connection()
        try:
            self._keep_alive.apply(connection)
            connection.setblocking(False)
            connection.sendall(new.challenge)
        except OSError as error:  # the node has gone meanwhile
            logger.debug("a connection of a node failed: %s", error)
            return
        self._strangers[connection] = time.monotonic() + SIGN_IN_S
        self._selector.register(connection, selectors.EVENT_READ, new)

    def _take(self, connection: socket.socket, known: _Connection) -> None:
        """Read what a node has sent, or find out that it is lost."""
        reason = "all its processes have ended, or the machine was restarted"
        try:
            data = read_bytes(connection, 4096)
        except OSError as error:
            data = b""
            if is_cut(error):
                reason = (
                    f"it gives no sign of life for {self._keep_alive.limit_s} s ({error.strerror}): the link is "
                    "cut, or the machine is down"
                )
        if data and known.node is None:
            self._greet(connection, known, data)
            return
        told = _RANK.findall(data)
        if not told or told[-1][0] == b"-":
            self._drop(connection)
        if known.node is None or self._is_closed:
            return
        if not data:
            self._on_lost(known.node, reason)
        for what, rank in told:
            if int(rank) in known.node.ranks:
                self._on_rank[what](known.node, int(rank))

    def _greet(self, connection: socket.socket, known: _Connection, data: bytes) -> None:
        """Read the first message of a node: a line with its name and ranks, signed with the job's secret."""
        known.read += data
        line, end, _ = known.read.partition(b"\n")
        if not end and len(known.read) < _MOST_BYTES:
            return
        try:
            signed = bytes.fromhex(line.decode("ascii"))
            body = json.loads(bytes(signing.verify(signed, challenge_name(known.challenge))))
            known.node = Node(str(body["node"]), tuple(map(int, body["ranks"])))
            del self._strangers[connection]
            connection.sendall(ACCEPTED)
        except (ValueError, KeyError, TypeError, OSError, signing.ForgedMessage) as error:
            logger.warning("[driver] a connection that is not from a node of this job was closed: %s", error)
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._strangers.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()


def read_bytes(connection: socket.socket, size: int, flags: int = 0) -> bytes:
    """Return what has arrived, at most `size` bytes; b"" if the other end has closed the connection.

    Args:
        flags: of recv(2)."""
    buffer = bytearray(size)
    return bytes(memoryview(buffer)[: connection.recv_into(buffer, size, flags)])


def challenge_name(challenge: bytes) -> str:
    """Return the name under which a node signs its first message. An answer fits one challenge only."""
    return f"watch/{challenge.hex()}"


def node_lost(node: Node, reason: str, describe_rank: Callable[[int], str], where: str) -> RuntimeError:
    """Return the failure of a job that has lost a node.

    Args:
        where: position of the job ("at step 3, ...")."""
    ranks = "; ".join(map(describe_rank, node.ranks))
    return RuntimeError(
        f"[driver] node {node.name} was lost, with rank {ranks}: {reason}. The job was {where}."
    )


def rank_ended(node: Node, rank: str, where: str) -> RuntimeError:
    """Return the failure of a job of which a rank has ended on another node and has said nothing.

    Args:
        rank: describes the rank, for example "1: actor, critic".
        where: position of the job ("at step 3, ...")."""
    return RuntimeError(
        f"[rank {rank}] has ended on node {node.name} and has said nothing: what started it there (torchrun) says by "
        "which signal or exit code. After SIGKILL the machine may have been out of memory (see dmesg). The "
        f"job was {where}."
    )


def has_node_watch(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether the nodes of this rank's job are watched: if there are several, or the driver is on
    another one."""
    return int(env.get(NUM_NODES) or env.get("GROUP_WORLD_SIZE") or "1") > 1


def start_node_watch_process(
    store: KeyValueStore, env: Mapping[str, str] = os.environ, keep_alive: KeepAlive = KeepAlive()
) -> None:
    """Start the process that watches the connection between this node and the driver, if this rank is the
    first of its node and the job has several nodes.

    Waits until the driver has told its address. The process ends with this rank.

    Args:
        store: a separate connection, see `mailbox.connect`.
        env: environment of the rank.
        keep_alive: when a silent driver counts as lost."""
    if env.get("LOCAL_RANK", "0") != "0" or not has_node_watch(env):
        return
    first = int(env["RANK"])
    ranks = range(first, first + int(env.get("LOCAL_WORLD_SIZE", "1")))
    address = store.get(WATCH_KEY).decode()
    subprocess.Popen(
        watch_command(address, os.getpid(), ranks, keep_alive),
        env={**env, signing.JOB_SECRET: signing.job_secret()},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C and the end of the rank's session must not reach it
    )


def watch_command(address: str, pid: int, ranks: range, keep_alive: KeepAlive) -> list[str]:
    """Return the command line of a node's watch process.

    Args:
        pid: process id of the node's first rank, with which it ends."""
    limits = (keep_alive.idle_s, keep_alive.interval_s, keep_alive.probes)
    module = "megarl.runtime.node_watch_process"
    return [sys.executable, "-P", "-m", module, *map(str, (address, pid, ranks.start, len(ranks), *limits))]
