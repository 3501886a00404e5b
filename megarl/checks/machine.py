"""What this machine has, asked without torch and without opening a device."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from megarl.config.installed import visible_gpus

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_NVIDIA_SMI_S = 3.0


@dataclass(frozen=True, slots=True)
class Machine:
    """
    Args:
        ram_bytes: memory that the processes of this machine, or of this container, can have together. None:
            not known.
        has_gpu: a job trains on GPUs here.
        gpu_bytes: memory of the smallest GPU. None: there is none, or not known.
        num_gpus: None: there is none, or not known.
        is_this: False for a machine that is only planned for: what this one's disk says of --save is then no
            error."""

    ram_bytes: int | None
    has_gpu: bool = False
    gpu_bytes: int | None = None
    num_gpus: int | None = None
    is_this: bool = True


def this_machine() -> Machine:
    num_gpus = visible_gpus() or None
    return Machine(_ram_bytes(), num_gpus is not None, _gpu_bytes() if num_gpus else None, num_gpus)


def free_bytes(folder: Path) -> int | None:
    """Of the file system that a folder is on, or will be on when it is created. None: not known."""
    there = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()), None)
    try:
        return shutil.disk_usage(there).free if there is not None else None
    except OSError:
        return None


def _ram_bytes() -> int | None:
    try:
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        limit = "max"
    return min(installed, int(limit)) if limit.isdigit() else installed


def _gpu_bytes() -> int | None:
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(
            query, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True
        ).stdout.split()
        return min(int(line) for line in lines) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
