"""Exchange signed messages with the driver over a TCP connection: the end of a rank or of a relay.

A message is a frame: eight bytes of length, then the data. Who connects first answers a challenge with the
job's secret. Imports no torch."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator

from megarl.runtime import signing
from megarl.runtime.node_watch import read_bytes

ACCEPTED, REFUSED, CHALLENGE_BYTES = b"+", b"-", 16
CHILD, REPORTER = b"child", b"reporter"
"""Purposes of a connection: a CHILD gets all commands, a REPORTER only reports."""
CHUNK = 1 << 18
_LENGTH = struct.Struct("<Q")
_CONNECTED_S = 60.0


class ConnectionLost(ConnectionError):
    """Raised if the connection to the driver, or to the relay of the node, has ended or cannot be made."""


def frame(data: bytes) -> bytes:
    """Return the data with its length before it."""
    return _LENGTH.pack(len(data)) + data


def split(frames: bytes) -> Iterator[memoryview]:
    """Yield the data of each of several whole frames."""
    at, view = 0, memoryview(frames)
    while at < len(frames):
        (size,) = _LENGTH.unpack_from(frames, at)
        at += _LENGTH.size + size
        yield view[at - size : at]


class FrameBuffer:
    """Collects the bytes of a connection until they are whole frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    def add(self, data: bytes) -> bytes:
        """Add received bytes, and return and remove the frames that are whole now."""
        self._bytes += data
        end = 0
        while len(self._bytes) >= end + _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._bytes, end)
            if len(self._bytes) < end + _LENGTH.size + size:
                break
            end += _LENGTH.size + size
        with memoryview(self._bytes) as view:
            whole = bytes(view[:end])
        del self._bytes[:end]
        return whole


def sign_in_name(challenge: bytes) -> str:
    """Return the name under which a connection signs its first message. An answer fits one challenge only."""
    return f"commands/{challenge.hex()}"


def sign_in(address: str, kind: bytes) -> socket.socket:
    """Return a new connection to the driver or to a relay that has accepted this process.

    Args:
        address: host:port.
        kind: CHILD or REPORTER.
    Raises: ConnectionLost if nobody is there; SecretError if the other end has another secret."""
    host, port = address.rsplit(":", 1)
    try:
        connection = socket.create_connection((host, int(port)), timeout=_CONNECTED_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = b""
        while len(challenge) < CHALLENGE_BYTES and (part := read_bytes(connection, CHALLENGE_BYTES)):
            challenge += part
        connection.sendall(frame(signing.sign(kind, sign_in_name(challenge))))
        answer = read_bytes(connection, 1)
    except OSError as error:
        raise ConnectionLost(f"{address} cannot be reached: {error}") from None
    if answer == REFUSED:
        raise signing.SecretError(
            f"{signing.JOB_SECRET} (variable): must be the same on all nodes. The process at {address} has "
            f"another one. {signing.HOW}"
        )
    if answer != ACCEPTED:
        raise ConnectionLost(f"{address} has ended")
    connection.settimeout(None)
    return connection


class Channel:
    """A rank's connection to the driver, or to the relay of its node. One thread at a time may read, and one
    may write.

    Args: as in `sign_in`, which raises the same."""

    def __init__(self, address: str, kind: bytes = CHILD) -> None:
        self._socket, self._buffer = sign_in(address, kind), FrameBuffer()
        self._waiting: deque[bytes] = deque()

    def has_message(self) -> bool:
        """Return whether a message waits. Does not block."""
        while not self._waiting and self._receive(socket.MSG_DONTWAIT):
            pass
        return bool(self._waiting)

    def next_message(self) -> bytes:
        """Return the next message. Blocks until there is one."""
        while not self._waiting:
            self._receive()
        return self._waiting.popleft()

    def report(self, data: bytes) -> None:
        """Send a message to the driver. Messages of one channel arrive in their order."""
        try:
            self._socket.sendall(frame(data))
        except OSError as error:
            raise ConnectionLost(f"cannot report to the driver: {error}") from None

    def close(self) -> None:
        self._socket.close()

    def _receive(self, flags: int = 0) -> bool:
        """Receive bytes, and return whether there were any. Raises: ConnectionLost."""
        try:
            data = read_bytes(self._socket, CHUNK, flags)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionLost(str(error)) from None
        if not data:
            raise ConnectionLost("the driver, or the relay of this node, has closed it")
        self._waiting.extend(map(bytes, split(self._buffer.add(data))))
        return True
