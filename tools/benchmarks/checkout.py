"""The commit that a benchmark measures."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def commit() -> str:
    """Return MEGARL_COMMIT, which a copy without git's folder needs, or this checkout's commit in 40 digits.

    -dirty follows if files have changed since. Without both it is "unknown"."""
    if given := os.environ.get("MEGARL_COMMIT"):
        return given
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except FileNotFoundError:  # a machine without git
        return "unknown"
    return done.stdout.strip() or "unknown"
