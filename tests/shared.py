"""Make what tests share once in a run of pytest, in whichever process of pytest-xdist asks first."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Any:
    """Return what `make` returns for a new folder of this name, as JSON keeps it. Other processes of this run
    wait, and get the same value and the same files, which no test may change."""
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    result, folder = root / f"{name}.json", root / name
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():  # or the process that made it has failed
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            made = json.dumps(make(folder))
            result.write_text(made)
    return json.loads(result.read_text())
