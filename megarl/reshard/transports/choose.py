"""Choose the transport of a pair of processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megarl.config.role_sections import TRANSPORTS


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a process, and the device of its weights."""

    node: str
    """Node name, equal for processes that see each other's memory: same kernel, same pid namespace."""
    rank: int
    """Rank in the world. For an engine's own process, the rank that speaks for it."""
    process: str
    device: str
    """Device of the weights: 'cpu' or 'cuda'."""


def place_here(rank: int, device: str, process: str | None = None) -> Place:
    """Return node, process and device of this process, or of the engine's `process` beside it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Place(f"{boot}/{os.readlink('/proc/self/ns/pid')}", rank, process or str(os.getpid()), device)


def ranks_per_node() -> int | None:
    """Return how many consecutive ranks share a node, by torchrun's variables.

    Returns: None without torchrun, or if nodes have unequal numbers of ranks."""
    local, nodes = int(os.environ.get("LOCAL_WORLD_SIZE", "0")), int(os.environ.get("GROUP_WORLD_SIZE", "0"))
    return local if local and local * nodes == int(os.environ.get("WORLD_SIZE", "-1")) else None


def choose(source: Place, destination: Place, wanted: str = "auto") -> tuple[str, str]:
    """Return the transport of a pair of processes, and the reason. Both ends get the same result.

    Args:
        wanted: --reshard-transport. It applies to pairs of processes. Within one process copies are always
            direct.
    Raises: ValueError for a transport that cannot work, with the reason and the alternatives."""
    best, why = _best(source, destination)
    if wanted == "auto" or best == "direct":
        return best, why
    why_not = {name: _why_not(name, source, destination) for name in TRANSPORTS if name != "auto"}
    if why_not[wanted] is None:
        return wanted, "--reshard-transport"
    works = ", ".join(name for name, reason in why_not.items() if reason is None)
    raise ValueError(
        f"--reshard-transport ({wanted}): weights of rank {source.rank} cannot get to the engine of "
        f"rank {destination.rank} "
        f"this way: {why_not[wanted]}. For this pair works: {works}. Try auto."
    )


def _best(source: Place, destination: Place) -> tuple[str, str]:
    if _same_process(source, destination):
        return "direct", "same process"
    for transport in ("shared-memory", "cuda-ipc"):
        if _why_not(transport, source, destination) is None:
            return transport, f"same node, other process, {source.device}"
    return "messages", _why_not(
        "shared-memory" if destination.device == "cpu" else "cuda-ipc", source, destination
    )


def _why_not(transport: str, source: Place, destination: Place) -> str | None:
    """Return the reason why a transport cannot work for a pair; None if it works."""
    if transport == "direct":
        return None if _same_process(source, destination) else "they are two processes"
    if transport == "messages":
        return "a rank sends no messages to itself" if source.rank == destination.rank else None
    device = "cpu" if transport == "shared-memory" else "cuda"
    for place in (source, destination):
        if place.device != device:
            return f"rank {place.rank} has its weights in {place.device} memory"
    return (
        None
        if source.node == destination.node
        else "they are on different nodes (or in different process namespaces)"
    )


def _same_process(source: Place, destination: Place) -> bool:
    return (source.node, source.process) == (destination.node, destination.process)
