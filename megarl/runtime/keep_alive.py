"""Let the kernel find out that the other end of a connection is gone. Imports no torch.

The kernels of both machines exchange keep-alive probes, so a process that is stopped, swapped out or holds
Python's lock still counts as alive. A connection that carries no other data fails after
`idle_s + probes * interval_s` seconds without an answer."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class KeepAlive:
    """The times after which an idle connection sends probes, and after which it fails."""

    idle_s: int = 4
    interval_s: int = 2
    probes: int = 3

    @property
    def limit_s(self) -> int:
        """Seconds without a sign of life after which the connection fails."""
        return self.idle_s + self.probes * self.interval_s

    def apply(self, connection: socket.socket) -> None:
        """Set these times as the keep-alive options of a TCP connection."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, self.idle_s),
            (socket.TCP_KEEPINTVL, self.interval_s),
            (socket.TCP_KEEPCNT, self.probes),
            # for the few bytes that a watch sends as its rank ends: unacknowledged data stops the probes
            (socket.TCP_USER_TIMEOUT, 1000 * self.limit_s),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def is_cut(error: OSError) -> bool:
    """Return whether a connection failed because the other machine does not answer, and not because the
    process at the other end has ended."""
    return error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
