"""Find processes by who has started them. Reads /proc, and imports no torch."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def agent_of(rank_pid: int) -> int:
    """Return the id of the process that has started a rank: torchrun's agent, or under Ray the actor of the
    node.

    Programs between it and the rank, such as `nsys profile`, have the rank's environment and are passed over.
    Raises: OSError if the rank has ended."""
    pid, run_id = parent_of(rank_pid), _variables(rank_pid).get("TORCHELASTIC_RUN_ID")
    while run_id is not None and rank_of(pid, run_id) is not None:
        pid = parent_of(pid)
    return pid


def rank_of(pid: int, run_id: str) -> int | None:
    """Return the rank that a process has been started for, None if it is of another job or is hidden.

    Args:
        run_id: TORCHELASTIC_RUN_ID of the job; "" if torchrun has not started it."""
    variables = _variables(pid)
    if variables.get("TORCHELASTIC_RUN_ID", "") != run_id or "RANK" not in variables:
        return None
    return int(variables["RANK"])


def parent_of(pid: int) -> int:
    """Return the id of a process's parent. Raises: OSError if the process has ended."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of_all() -> dict[int, list[int]]:
    """Return process id -> ids of its children, for all processes of this machine that have some."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if entry.name.isdigit():
                children.setdefault(parent_of(int(entry.name)), []).append(int(entry.name))
    return children


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's children and of theirs, parents first."""
    children = children_of_all()
    found = [*children.get(pid, [])]
    for one in found:  # grows
        found += children.get(one, [])
    return found


def _variables(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with, {} if it is hidden or has ended."""
    try:
        text = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return {}
    return dict(item.partition("=")[::2] for item in text.split("\0"))
