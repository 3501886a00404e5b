"""Pass commands from the driver to all ranks, and their reports back, through a tree of relays.

    driver            CommandTree: a thread of the driver's process
      |-- relay 0     one light process per node (relay_process.py), only in a job with several nodes
      |     |-- rank 0 ... rank 7     of this node
      |     |-- relay 16 ... 31       of other nodes, each with ranks and relays of its own
      |-- ...         up to relay 15
      `-- rank 0 ...  in a job on one node the ranks are the driver's children

Every rank gets the same stream of commands, so the driver sends a command once per child, and a relay passes
bytes on as they come. What the driver sends and keeps therefore does not grow with the number of ranks.
Reports go up as whole frames. No rank's interpreter passes anything on, so a rank that is stopped, or holds
Python's lock, delays no other. Imports no torch.

Connections that do not sign in with the job's secret are closed. Whoever writes a message signs it, and
whoever reads it checks the signature; relays do not look into it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from megarl.runtime import signing
from megarl.runtime.acceptor import SIGN_IN_S, Acceptor
from megarl.runtime.channel import (
    ACCEPTED,
    CHALLENGE_BYTES,
    CHILD,
    CHUNK,
    REFUSED,
    REPORTER,
    Channel,
    FrameBuffer,
    frame,
    sign_in_name,
    split,
)
from megarl.runtime.key_value_store import KeyValueStore
from megarl.runtime.network import own_address
from megarl.runtime.node_watch import has_node_watch, read_bytes

logger = logging.getLogger(__name__)
FAN_OUT = 16
"""Number of nodes to which the driver, and the relay of each node, pass commands on."""
DRIVER_ADDRESS = "commands/driver"
"""Key of the job's store with the address of the driver's CommandTree."""
_BACKLOG, _MOST_BUFFERS, _FLUSH_S, _LONGEST_HELLO = 4096, 64, 2.0, 1024


def parent_of(node: int) -> int | None:
    """Return the node from whose relay a node gets its commands, or None if that is the driver."""
    return None if node < FAN_OUT else node // FAN_OUT - 1


def children_of(node: int | None, num_nodes: int) -> range:
    """Return the nodes that get their commands from the relay of a node, or from the driver (None)."""
    first = 0 if node is None else (node + 1) * FAN_OUT
    return range(min(first, num_nodes), min(first + FAN_OUT, num_nodes))


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of an IP address of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_BACKLOG)


@dataclass(eq=False)
class _Peer:
    """A connection of a relay, which has no `kind` until it has signed in."""

    socket: socket.socket
    challenge: bytes = field(default_factory=lambda: secrets.token_bytes(CHALLENGE_BYTES))
    kind: bytes | None = None
    received: FrameBuffer = field(default_factory=FrameBuffer)
    unsent: deque[bytes | memoryview] = field(default_factory=deque)
    waits_to_send: bool = False


class Relay:
    """Sends the bytes of commands to all children, and the reports of all children upwards, until the
    connection upwards ends.

    Args:
        listener: socket to which the children connect.
        num_children: number of children that will come. Until then the commands are kept for those that are
            late.
        upstream: signed-in connection to the parent; None in the driver.
        has_work: asked once a second; the relay ends if it returns False and there is no child."""

    def __init__(
        self,
        listener: socket.socket,
        num_children: int,
        upstream: socket.socket | None = None,
        has_work: Callable[[], bool] = lambda: True,
    ) -> None:
        self._listener, self._num_missing, self._has_work = listener, num_children, has_work
        self._history: list[bytes] = []
        """All commands so far, until all children are there."""
        self._children: list[_Peer] = []
        self._strangers: dict[_Peer, float] = {}
        """Connections that have not signed in, in the order of their beginning -> time at which they are
        closed."""
        self._changed: dict[_Peer, None] = {}
        """Peers with bytes that have not been offered to their sockets yet."""
        self._end_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(self._selector, listener)
        self._upstream = None if upstream is None else _Peer(upstream, kind=b"parent")
        if self._upstream is not None:
            self._upstream.socket.setblocking(False)
            self._selector.register(self._upstream.socket, selectors.EVENT_READ, self._upstream)

    def run(self) -> None:
        """Pass messages on until the parent has ended, or nobody needs this relay."""
        while not self._is_over():
            for key, events in self._selector.select(min(1.0, self._acceptor.retry_s or 1.0)):
                self._handle(key, events)
            for peer in [*self._changed]:
                self._flush(peer)
            self._changed.clear()
            self._drop_strangers()
        for key in [*self._selector.get_map().values()]:
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._acceptor.close()
        self._selector.close()

    def _drop_strangers(self) -> None:
        """Close the connections that have not signed in for too long."""
        now = time.monotonic()
        while self._strangers and now > next(iter(self._strangers.values())):
            self._drop(next(iter(self._strangers)))

    def _is_over(self) -> bool:
        if self._end_at is None:
            is_idle = not self._children and not (self._upstream and self._upstream.unsent)
            return is_idle and not self._has_work()
        return time.monotonic() > self._end_at or not any(child.unsent for child in self._children)

    def _end_soon(self) -> None:
        """End when all children have got what was sent, within two seconds."""
        self._end_at = self._end_at or time.monotonic() + _FLUSH_S

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif isinstance(key.data, _Peer):
            if events & selectors.EVENT_WRITE:
                self._changed[key.data] = None
            if events & selectors.EVENT_READ:
                self._read(key.data)

    def _accept(self) -> None:
        if (connection := self._acceptor.accept()) is None:
            return
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # it may have gone meanwhile, which its first read finds
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = _Peer(connection)
        self._strangers[peer] = time.monotonic() + SIGN_IN_S
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._put(peer, peer.challenge)

    def _read(self, peer: _Peer) -> None:
        try:
            data = read_bytes(peer.socket, CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
        elif peer is self._upstream:
            self._broadcast(data)
        elif whole := peer.received.add(data):
            if peer.kind is None:
                first, *others = split(whole)
                self._greet(peer, first)
                whole = b"".join(frame(bytes(one)) for one in others)
            if peer.kind is not None and whole:
                self._pass_up(whole)
        elif peer.kind is None and len(peer.received) > _LONGEST_HELLO:
            self._drop(peer)

    def _greet(self, peer: _Peer, hello: memoryview) -> None:
        """Let a connection in whose first message is signed with the job's secret, or close it."""
        try:
            kind = bytes(signing.verify(bytes(hello), sign_in_name(peer.challenge)))
        except signing.ForgedMessage as error:
            logger.warning("a connection that is not from a process of this job was closed: %s", error)
            with contextlib.suppress(OSError):
                peer.socket.sendmsg([REFUSED])
            self._drop(peer)
            return
        peer.kind = kind
        del self._strangers[peer]
        self._put(peer, ACCEPTED)
        if kind == CHILD:
            self._children.append(peer)
            for command in self._history:
                self._put(peer, command)
            self._num_missing -= 1
            if self._num_missing <= 0:
                self._history.clear()

    def _broadcast(self, data: bytes) -> None:
        if self._num_missing > 0:
            self._history.append(data)
        for child in self._children:
            self._put(child, data)

    def _pass_up(self, reports: bytes) -> None:
        """Send whole frames to the parent."""
        if self._upstream is not None:
            self._put(self._upstream, reports)

    def _put(self, peer: _Peer, data: bytes) -> None:
        peer.unsent.append(data)
        self._changed[peer] = None

    def _flush(self, peer: _Peer) -> None:
        """Send what the connection takes now, and wait until it takes more if something is left."""
        if peer.socket.fileno() < 0:
            return
        try:
            while peer.unsent:
                sent = peer.socket.sendmsg([*islice(peer.unsent, _MOST_BUFFERS)])
                while peer.unsent and sent >= len(peer.unsent[0]):
                    sent -= len(peer.unsent.popleft())
                if sent:
                    peer.unsent[0] = memoryview(peer.unsent[0])[sent:]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)
            return
        if peer.waits_to_send != bool(peer.unsent):
            peer.waits_to_send = bool(peer.unsent)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
            self._selector.modify(peer.socket, events, peer)

    def _drop(self, peer: _Peer) -> None:
        if peer.socket.fileno() < 0:
            return
        self._strangers.pop(peer, None)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        peer.unsent.clear()
        if peer in self._children:
            self._children.remove(peer)
        if peer is self._upstream:
            self._end_soon()


class CommandTree(Relay):
    """The root of the tree, on a thread of the driver's process.

    Args:
        address: IP address of this machine by which the children reach it.
        num_children: as in Relay.
        take_reports: called on the thread of the tree with frames of reports, see `channel.split`."""

    def __init__(self, address: str, num_children: int, take_reports: Callable[[bytes], object]) -> None:
        listener = listen(address)
        super().__init__(listener, num_children)
        self.address = f"{address}:{listener.getsockname()[1]}"
        """host:port, for the children."""
        self._take_reports = take_reports
        self._posted: deque[bytes | None] = deque()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self.run, name="send_commands", daemon=True)
        self._thread.start()

    def post(self, message: bytes) -> None:
        """Send a message to all ranks, in the order of the calls. Returns at once; takes no lock, so a signal
        may interrupt it."""
        self._tell(frame(message))

    def close(self) -> None:
        """Send what is posted, then close all connections."""
        self._tell(None)
        self._thread.join(2 * _FLUSH_S)
        self._wake.close()

    def _tell(self, posted: bytes | None) -> None:
        self._posted.append(posted)
        with contextlib.suppress(OSError):  # the thread has many to read already, or it has ended
            self._wake.sendmsg([b"."])

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is not self._woken:
            super()._handle(key, events)
            return
        read_bytes(self._woken, CHUNK)
        while self._posted:
            if (message := self._posted.popleft()) is None:
                self._end_soon()
            else:
                self._broadcast(message)

    def _pass_up(self, reports: bytes) -> None:
        self._take_reports(reports)


def open_channel(store: KeyValueStore, env: Mapping[str, str] = os.environ) -> Channel:
    """Connect a rank to the driver, through the relay of its node if the job has several nodes.

    The first rank of a node starts the relay. Blocks until the driver has started.

    Args:
        store: a separate connection, see `mailbox.connect`.
        env: environment of the rank.
    Raises: as `Channel`."""
    if not has_node_watch(env):
        return Channel(store.get(DRIVER_ADDRESS).decode())
    node = int(env.get("GROUP_RANK", "0"))
    if env.get("LOCAL_RANK", "0") == "0":
        _start_relay(store, node, env)
    return Channel(store.get(_key(node)).decode())


def report_directly(store: KeyValueStore, message: bytes) -> None:
    """Send the driver one report over a connection of its own, from a process that may have no channel.

    Blocks until the driver has started. Raises: as `Channel`."""
    channel = Channel(store.get(DRIVER_ADDRESS).decode(), REPORTER)
    channel.report(message)
    channel.close()


def _key(node: int | None) -> str:
    return DRIVER_ADDRESS if node is None else f"commands/relay/{node}"


def _start_relay(store: KeyValueStore, node: int, env: Mapping[str, str]) -> None:
    """Start the relay process of this node, once its parent has told its address."""
    num_nodes = int(env.get("GROUP_WORLD_SIZE", "1"))
    num_children = int(env.get("LOCAL_WORLD_SIZE", "1")) + len(children_of(node, num_nodes))
    listener = listen(address := own_address(env))
    store.set(_key(node), f"{address}:{listener.getsockname()[1]}")
    parent = store.get(_key(parent_of(node))).decode()
    arguments = map(str, (listener.fileno(), parent, num_children, os.getpid()))
    subprocess.Popen(
        [sys.executable, "-P", "-m", "megarl.runtime.relay_process", *arguments],
        env={**env, signing.JOB_SECRET: signing.job_secret()},
        stdin=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
        start_new_session=True,  # Ctrl-C and the end of the rank's session must not reach it
    )
    listener.close()
