"""Name the shared memory of vLLM's engines, and remove what engines that have ended or were killed left of it.

This module imports no torch: a process that only starts and ends ranks calls it as they end."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

SHM_PREFIX = "megarl-"
_SHM_FOLDER = Path("/dev/shm")


def remove_own_shared_memory() -> None:
    """Remove the shared memory that vLLM's workers leave behind, after this process's engine has ended."""
    for path in _SHM_FOLDER.glob(f"{SHM_PREFIX}{os.getpid()}-*"):
        path.unlink(missing_ok=True)


def sweep_shared_memory() -> list[str]:
    """Remove the shared memory of dead jobs, named megarl-<pid of a process on this machine>-... .

    Returns: the names removed."""
    removed = []
    for path in _SHM_FOLDER.glob(f"{SHM_PREFIX}*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(PermissionError):  # owned by another user
                path.unlink(missing_ok=True)
                removed.append(path.name)
    return removed
