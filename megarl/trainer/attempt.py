"""Number the attempts at a run, so that one that was given up cannot write beside its successor.

    attempt.json    {"attempts": [{"number": 1, "node": "node0", "pid": 17, "started": "...", "after_step": 0,
                                   "launcher": "3f2a..."}, ...]}

Every process that opens the run folder to train adds its attempt. Before a checkpoint, a row of metrics, samples
or exported weights are published, the driver reads the file again: the last attempt may write. The lock of the
folder does not suffice, because a machine that is cut off from the others keeps what it believes to be its lock."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from megarl.failures import ExplainedError
from megarl.files.writing import writing
from megarl.runtime.process import LAUNCHER

ATTEMPTS = "attempt.json"


class SupersededError(ExplainedError, RuntimeError):
    """Raised if a job would write into a run folder that a later attempt has taken over."""

    read_on = "docs/clusters.md, section Read a failure"


class Attempt:
    """This process's attempt at a run: one of the jobs that start or continue the run in a folder.

    Args:
        after_step: the step that the attempt continues after."""

    def __init__(self, folder: Path, after_step: int) -> None:
        self._folder = folder
        earlier = _attempts(folder)
        self.number = 1 + max((known["number"] for known in earlier), default=0)
        """Number of the attempt, from 1. It rises by 1 at every restart and every resumption."""
        own = {
            "number": self.number,
            "node": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S%z"),
            "after_step": after_step,
            "launcher": os.environ.get(LAUNCHER),
        }
        path = folder / ATTEMPTS
        new = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                new.write_text(json.dumps({"attempts": [*earlier, own]}) + "\n")
                os.replace(new, path)
            finally:
                new.unlink(missing_ok=True)  # of a full disk

    def is_current(self) -> bool:
        """Return whether no later attempt has taken the folder over."""
        return self._successor() is None

    def check(self, what: str) -> None:
        """Raise SupersededError if a later attempt has taken the folder over.

        Args:
            what: what would be written, for the message."""
        if (later := self._successor()) is not None:
            raise SupersededError(
                f"--save ({self._folder}): attempt {self.number} must not write {what}, because attempt "
                f"{later['number']} on node {later['node']} (process {later['pid']}) has continued the run since "
                f"{later['started']}. Nothing was written; let that attempt go on, or try another --save."
            )

    def _successor(self) -> dict[str, Any] | None:
        """Return the last attempt if it is later than this one."""
        last: dict[str, Any] = (_attempts(self._folder) or [{"number": 0}])[-1]
        return last if last["number"] > self.number else None


def launcher_of_last_attempt(folder: Path) -> str | None:
    """Return the launcher of the last attempt at the run in a folder; None if there is none, or no run."""
    launcher: str | None = (_attempts(folder) or [{}])[-1].get("launcher")
    return launcher


def _attempts(folder: Path) -> list[dict[str, Any]]:
    """Return the attempts in a run folder, oldest first; [] if there is no file or a damaged one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        attempts = json.loads((folder / ATTEMPTS).read_text())["attempts"]
        return [known for known in attempts if isinstance(known["number"], int)]
    return []
