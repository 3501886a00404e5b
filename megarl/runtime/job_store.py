"""Create the c10d store (torch.distributed.TCPStore) of a job whose ranks this process starts.

Nobody outside of the machine reaches the store, and nobody else on the machine can sign messages."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from megarl.runtime.signing import JOB_SECRET, job_secret

if TYPE_CHECKING:
    import torch.distributed as dist

_BACKLOG = 2048  # backlog for ranks that connect at once; torch's own number
LOOPBACK = "127.0.0.1"


def loopback_store() -> dist.TCPStore:
    """Return a new TCPStore on a free port that only this machine can reach. torch alone would listen on all
    interfaces."""
    import torch.distributed as dist

    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        return dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def store_environment(store: dist.TCPStore) -> dict[str, str]:
    """Return the environment variables by which a rank finds the store and signs its messages."""
    return {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        JOB_SECRET: job_secret(),
    }
