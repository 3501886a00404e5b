"""Pass the driver's commands to the ranks of one node and to the relays of other nodes (relay.py).

    python -m megarl.runtime.relay_process LISTENER PARENT NUM_CHILDREN PID

It ends when its parent has ended, or when the node's first rank and all children have. Imports no torch, and
takes some 15 MB."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys

from megarl.runtime import signing
from megarl.runtime.channel import CHILD, ConnectionLost, sign_in
from megarl.runtime.relay import Relay


def main(listener: int, parent: str, num_children: int, rank_pid: int) -> int:
    """Pass messages on until nobody needs it. Returns the exit code.

    Args:
        listener: file descriptor of a socket that listens for the children.
        parent: host:port of the relay of another node, or of the driver.
        num_children: number of ranks and relays that will connect.
        rank_pid: process id of the first rank of this node, which has started this process."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # it ends with its ranks, not before
    try:
        rank = os.pidfd_open(rank_pid)
        upstream = sign_in(parent, CHILD)
    except (ProcessLookupError, ConnectionLost):  # the job has ended, and others tell why
        return 0

    def has_rank() -> bool:
        return not select.select([rank], [], [], 0.0)[0]

    Relay(socket.socket(fileno=listener), num_children, upstream, has_rank).run()
    return 0


if __name__ == "__main__":
    fd, where, count, pid = sys.argv[1:]
    signing.job_secret()
    sys.exit(main(int(fd), where, int(count), int(pid)))
