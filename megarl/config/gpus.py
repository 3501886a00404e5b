"""The GPUs of this machine, counted without torch and without opening a device."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

_DEVICES = Path("/dev")


def visible_gpus() -> int:
    """How many GPUs a job here sees. 0: it runs on the CPU.

    torch.cuda.device_count() will say the same, as far as files and the environment tell."""
    try:
        if importlib.metadata.version("torch").endswith("+cpu"):
            return 0
    except importlib.metadata.PackageNotFoundError:
        pass
    installed = len(list(_DEVICES.glob("nvidia[0-9]*"))) if (_DEVICES / "nvidiactl").exists() else 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return installed if chosen is None or not installed else _count(chosen, installed)


def _count(chosen: str, installed: int) -> int:
    """Of CUDA_VISIBLE_DEVICES: numbers or UUIDs. CUDA ignores what follows a number that is not there."""
    names = [name.strip() for name in chosen.split(",")]
    is_there = [
        bool(name) and (not name.lstrip("-").isdigit() or 0 <= int(name) < installed) for name in names
    ]
    return is_there.index(False) if False in is_there else len(names)
