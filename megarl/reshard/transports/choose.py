"""Which transport a pair of processes takes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megarl.config.role_sections import TRANSPORTS


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is and what its weights lie in."""

    node: str
    """Equal for two processes that can see each other's memory: same kernel, same pid namespace."""
    rank: int
    """Of the world; the one that speaks for it, if the process is an engine's own."""
    process: str
    device: str
    """'cpu' or 'cuda'."""


def place_here(rank: int, device: str, process: str | None = None) -> Place:
    """This process, or the engine's `process` beside it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Place(f"{boot}/{os.readlink('/proc/self/ns/pid')}", rank, process or str(os.getpid()), device)


def ranks_per_node() -> int | None:
    """How many consecutive ranks share a node, as torchrun says; None if there was no torchrun, or nodes have
    unequal numbers."""
    local, nodes = int(os.environ.get("LOCAL_WORLD_SIZE", "0")), int(os.environ.get("GROUP_WORLD_SIZE", "0"))
    return local if local and local * nodes == int(os.environ.get("WORLD_SIZE", "-1")) else None


def choose(source: Place, destination: Place, wanted: str = "auto") -> tuple[str, str]:
    """(transport, why) of a pair. Both ends get the same answer.

    Args:
        wanted: --reshard-transport. It is about pairs of processes: within one, copies are always direct.
    Raises: ValueError for one that cannot work: why not, and what does."""
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
    """None: it works."""
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
