"""Create the c10d store (torch.distributed.TCPStore) of a job whose ranks this process starts.

Only ranks on other machines are a reason to let others reach the store. Nobody without the job's secret can
sign messages."""

from __future__ import annotations

import os
import socket
import uuid
from typing import TYPE_CHECKING

from megarl.runtime.signing import JOB_SECRET, job_secret

if TYPE_CHECKING:
    import torch.distributed as dist

_BACKLOG = 2048  # backlog for ranks that connect at once; torch's own number
LOOPBACK = "127.0.0.1"


def job_store(address: str = LOOPBACK) -> dist.TCPStore:
    """Return a new TCPStore on a free port of this address of this machine. torch alone would listen on all
    interfaces."""
    import torch.distributed as dist

    with socket.socket() as listener:
        listener.bind((address, 0))
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        return dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def job_environment(
    store: dist.TCPStore, world_size: int, ranks_per_node: int, attempt: int
) -> dict[str, str]:
    """Return the variables that torchrun's agent would set for the ranks, by which they find the store and
    sign their messages.

    Missing are those that differ between machines and between ranks. GROUP_RANK is that of the first machine.

    Args:
        attempt: number of earlier starts of the job."""
    return {
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": str(uuid.uuid4()),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": str(world_size // ranks_per_node),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # as torchrun does
        JOB_SECRET: job_secret(),
    }
