"""The processes of a job whose nodes are watched, without torch and without a job.

    watched_node.py driver FOLDER ADDRESS IDLE_S INTERVAL_S PROBES
    watched_node.py agent  FOLDER RANK HOLD_S IDLE_S INTERVAL_S PROBES     starts the one rank of a node
    watched_node.py rank   FOLDER HOLD_S IDLE_S INTERVAL_S PROBES

The rank holds the interpreter's lock in native code for HOLD_S seconds. What the driver reports as lost is in
FOLDER/lost, a line of JSON each, and a rank that has ended in FOLDER/ended."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from megarl.runtime.keep_alive import KeepAlive
from megarl.runtime.node_watch import Node, NodeWatch, start_node_watch_process


class FileStore:
    """The job's store as far as the start of a watch process needs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> bytes:
        path = self.folder / "address"
        while not path.exists() or not path.read_bytes():
            time.sleep(0.02)
        return path.read_bytes()


def main(what: str, folder: Path, *arguments: str) -> None:
    if what == "driver":
        address, *limits = arguments

        def lost(node: Node, reason: str) -> None:
            line = {"node": node.name, "ranks": node.ranks, "reason": reason, "time": time.time()}
            with open(folder / "lost", "a") as file:
                file.write(json.dumps(line) + "\n")

        def ended(node: Node, rank: int) -> None:
            (folder / "ended").write_text(json.dumps([node.name, rank]))

        watch = NodeWatch(address, lost, ended, KeepAlive(*map(int, limits)))
        (folder / "address").write_text(watch.address)
    elif what == "agent":
        rank, *rest = arguments
        env = {"RANK": rank, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
        command = [sys.executable, "-P", __file__, "rank", str(folder), *rest]
        own = os.environ | env | {"TORCHELASTIC_RUN_ID": str(folder)}
        sys.exit(subprocess.Popen(command, env=own, start_new_session=True).wait())
    else:
        hold, *limits = arguments
        start_node_watch_process(FileStore(folder), keep_alive=KeepAlive(*map(int, limits)))
        (folder / f"rank_{os.environ['RANK']}").write_text(str(os.getpid()))
        ctypes.PyDLL(None).sleep(int(hold))  # PyDLL keeps the interpreter's lock
        (folder / f"held_{os.environ['RANK']}").touch()
    while not (folder / "end").exists():
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
