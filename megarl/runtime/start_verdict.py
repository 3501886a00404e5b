"""Tell the ranks of all nodes under torchrun whether the job can start.

Only rank 0 checks the configuration and the inputs. If it ends with an error, torchrun ends the ranks of its
own node; those of other nodes would wait for it to join the process group. So rank 0 writes its verdict,
signed, to the store that torchrun's agents have before there is a process group: nothing, or why the job
cannot start. Every other rank reads it before it joins."""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta

from megarl.runtime import signing

_KEY, _READ = "start", "start/read"
_SLICE_S = 5.0
_ACKNOWLEDGE_S = 30.0  # other ranks import torch, Megatron-Core and vLLM before they read


def is_awaited() -> bool:
    """Return whether ranks on other nodes wait for rank 0's verdict: on several nodes under torchrun, whose
    agents share a store."""
    several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    return several and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def publish(reason: str) -> None:
    """Tell all ranks why the job cannot start, or by "" that it can. Called by rank 0.

    With a reason it returns when all ranks have read it, at most after 30 seconds: with a static rendezvous
    the store ends with the agent of this node."""
    if not is_awaited():
        return
    from megarl.runtime.mailbox import connect

    store = connect()
    text = f"node {socket.gethostname()}: {reason}" if reason else ""
    try:
        signed = signing.sign(text.encode(), _KEY)
    except signing.SecretError:  # others then hear that the secret is not the same on all nodes
        signed = bytes(64)
    store.set(_KEY, signed)
    deadline, others = time.monotonic() + _ACKNOWLEDGE_S, int(os.environ["WORLD_SIZE"]) - 1
    while reason and store.add(_READ, 0) < others and time.monotonic() < deadline:
        time.sleep(0.1)


def await_start(timeout_s: float) -> str:
    """Return rank 0's reason why the job cannot start, or "" if it can. Called by all other ranks.

    Args:
        timeout_s: seconds until the job is given up.
    """
    if not is_awaited():
        return ""
    import torch.distributed as dist

    from megarl.runtime.mailbox import connect

    deadline = time.monotonic() + timeout_s
    try:
        store = connect()
        while True:
            try:
                store.wait([_KEY], timedelta(seconds=_SLICE_S))
                break
            except dist.DistStoreError:  # the slice is over
                if time.monotonic() >= deadline:
                    return f"rank 0 has not said within {timeout_s:.0f} s whether the job can start."
        signed = store.get(_KEY)
        store.add(_READ, 1)
    except (dist.DistNetworkError, dist.DistBackendError, RuntimeError) as error:
        return (
            f"torchrun's store ended before rank 0 said whether the job can start: its node has the reason "
            f"({type(error).__name__})."
        )
    try:
        return str(signing.verify(signed, _KEY), "utf-8")
    except signing.ForgedMessage as error:
        return str(error)


def tell(reason: str) -> None:
    """Print the reason why the job cannot start, once per node."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(f"{reason}\n")
