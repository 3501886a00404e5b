"""Read the run folder on a rank, for the driver's test that all nodes share it."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

_TICK_S = 0.1


class RunFolderOfRank:
    """Lets the driver read a file of the run folder on a rank. It is a base class of the role that is on every
    rank.

    That role is data or, in supervised fine-tuning, the actor."""

    def read_nonce(self, path: str, wait_s: float) -> dict[str, str]:
        """Return the first line of a file with this rank's host name and the absolute path.

        The nonce is "" if the file does not appear within `wait_s` seconds: a network file system may show a
        new file late."""
        file, deadline, nonce = Path(path).absolute(), time.monotonic() + wait_s, ""
        while not nonce:
            with contextlib.suppress(OSError):
                nonce = file.read_text().partition("\n")[0]
            if nonce or time.monotonic() >= deadline:
                break
            time.sleep(_TICK_S)
        return {"nonce": nonce, "node": socket.gethostname(), "path": str(file)}
