"""What this machine has, asked without torch and without opening a device."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_NVIDIA_SMI_S = 3.0


@dataclass(frozen=True, slots=True)
class Machine:
    """
    Args:
        ram_bytes: memory that the processes of this machine, or of this container, can have together. None: not known.
        has_gpu: a job trains on GPUs here.
        gpu_bytes: memory of the smallest GPU. None: there is none, or not known."""

    ram_bytes: int | None
    has_gpu: bool = False
    gpu_bytes: int | None = None


def this_machine() -> Machine:
    has_gpu = _has_gpu()
    return Machine(_ram_bytes(), has_gpu, _gpu_bytes() if has_gpu else None)


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


def _has_gpu() -> bool:
    """As torch.cuda.is_available() will answer, as far as files tell."""
    try:
        cpu_build = importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        cpu_build = False
    return (
        not cpu_build
        and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")
        and Path("/dev/nvidiactl").exists()
    )


def _gpu_bytes() -> int | None:
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(
            query, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True
        ).stdout.split()
        return min(int(line) for line in lines) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
