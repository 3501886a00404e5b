"""Read this machine's memory and GPUs without torch and without opening a device."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from megarl.config.installed import visible_gpus

_CGROUP_LIMIT, _CGROUP_CPUS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/cpu.max")
_NVIDIA_SMI_S = 3.0


@dataclass(frozen=True, slots=True)
class Machine:
    """The memory and GPUs of a machine.

    Args:
        ram_bytes: memory that all processes of this machine or container can use together, or None if not
            known.
        has_gpu: whether a job trains on GPUs here.
        gpu_bytes: memory of the smallest GPU, or None if there is none or it is not known.
        num_gpus: number of GPUs, or None if there is none or it is not known.
        num_cores: number of CPU cores that processes of this machine or container can use, or None if not
            known.
        is_this: False for a planned machine. Problems of --save on this machine's disk are then no errors."""

    ram_bytes: int | None
    has_gpu: bool = False
    gpu_bytes: int | None = None
    num_gpus: int | None = None
    num_cores: int | None = None
    is_this: bool = True


def this_machine() -> Machine:
    num_gpus = visible_gpus() or None
    gpu_bytes = _gpu_bytes() if num_gpus else None
    return Machine(_ram_bytes(), num_gpus is not None, gpu_bytes, num_gpus, _num_cores())


def _num_cores() -> int:
    """Return the number of cores by this process's affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CGROUP_CPUS.read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # another version of cgroups, or no quota ("max")
        return cores


def free_bytes(folder: Path) -> int | None:
    """Return the free bytes of the file system of a folder, or None if not known.

    The folder need not exist yet."""
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
