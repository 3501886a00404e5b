"""Several nodes on one machine: each has its own network, host name, /dev/shm, /tmp and process ids.

    with Nodes(2, folder) as nodes:
        process = nodes.start(1, ["ray", "start", ...])
        nodes.kill(1)

Linux namespaces make them, which takes root and the programs `ip` and `unshare`."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

BRIDGE, LAST_BYTES = "megarl-br", "10.78.0"
CHECKOUT = Path(__file__).resolve().parents[2]
SETUP = """
hostname node$NODE
mkdir -p "$NODE_FOLDER/tmp" "$NODE_FOLDER/checkout"
mount --bind "$NODE_CHECKOUT" "$NODE_FOLDER/checkout"
mount -t tmpfs tmpfs /dev/shm
mount --bind "$NODE_FOLDER/tmp" /tmp
if [ ! -e "$NODE_CHECKOUT/tests" ]; then # it is in a folder of which the node has its own
    mkdir -p "$NODE_CHECKOUT"
    mount --bind "$NODE_FOLDER/checkout" "$NODE_CHECKOUT"
fi
export TMPDIR=/tmp
cp /etc/hosts "$NODE_FOLDER/hosts"
echo "$NODE_HOSTS" >> "$NODE_FOLDER/hosts"
mount --bind "$NODE_FOLDER/hosts" /etc/hosts
[ -z "${NODE_HIDES:-}" ] || mount -t tmpfs tmpfs "$NODE_HIDES"
exec "$@"
"""


def why_not() -> str | None:
    """Return why nodes cannot be made here, or None."""
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [program for program in ("ip", "unshare", "nsenter") if shutil.which(program) is None]
    if missing:
        return f"{missing[0]} is not installed"
    made = subprocess.run(["unshare", "--mount", "--uts", "--pid", "--fork", "true"], capture_output=True)
    return None if made.returncode == 0 else f"unshare: {made.stderr.decode().strip()}"


def address(node: int) -> str:
    return f"{LAST_BYTES}.{node + 1}"


class Nodes:
    """Nodes node0, node1, ... on one bridge. `folder` is seen by all of them, under the same path, and must
    not be in /tmp."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        self.processes: list[subprocess.Popen] = []

    def __enter__(self) -> Nodes:
        self._lock = open(Path(tempfile.gettempdir()) / "megarl-nodes.lock", "w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # another test may have nodes of the same names
        self._remove()
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("link", "set", BRIDGE, "up")
        for node in range(self.number):
            _ip("netns", "add", self.name(node))
            _ip(
                *("link", "add", f"{BRIDGE}{node}", "type", "veth"),
                *("peer", "name", "eth0", "netns", self.name(node)),
            )
            _ip("link", "set", f"{BRIDGE}{node}", "master", BRIDGE, "up")
            _ip("-n", self.name(node), "addr", "add", f"{address(node)}/24", "dev", "eth0")
            for interface in ("eth0", "lo"):
                _ip("-n", self.name(node), "link", "set", interface, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for node in range(self.number):
            self.kill(node)
        self._remove()
        self._lock.close()

    def start(self, node: int, command: Sequence[str], **env: str) -> subprocess.Popen:
        """Start a command on a node; its output goes to <folder>/node<number>.log. Commands of one node share
        its network only. With NODE_HIDES=folder in `env` this node has an empty folder in place of that one."""
        hosts = "\n".join(f"{address(other)} node{other}" for other in range(self.number))
        own = self.folder / f"node{node}"
        own.mkdir(parents=True, exist_ok=True)
        variables = {
            "NODE": str(node),
            "NODE_FOLDER": str(own),
            "NODE_HOSTS": hosts,
            "NODE_CHECKOUT": str(CHECKOUT),
        }
        unshare = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with open(self.folder / f"node{node}.log", "ab") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name(node), *unshare, "bash", "-c", SETUP, "node", *command],
                env=os.environ | variables | env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def log(self, node: int) -> str:
        return (self.folder / f"node{node}.log").read_text()

    def cut(self, node: int) -> None:
        """Cut the link between a node and all others."""
        _ip("link", "set", f"{BRIDGE}{node}", "down")

    def heal(self, node: int) -> None:
        """Undo `cut`."""
        _ip("link", "set", f"{BRIDGE}{node}", "up")

    def pids(self, node: int) -> list[int]:
        """Return the ids of all processes of a node."""
        found = subprocess.run(["ip", "netns", "pids", self.name(node)], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def kill(self, node: int) -> None:
        """Kill all processes of a node at once, as when its power fails."""
        for pid in self.pids(node):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # ended with its parent
                continue

    def name(self, node: int) -> str:
        """Return the name of a node's network namespace."""
        return f"{BRIDGE}-node{node}"

    def _remove(self) -> None:
        for node in range(self.number):
            subprocess.run(["ip", "link", "del", f"{BRIDGE}{node}"], capture_output=True)
            subprocess.run(["ip", "netns", "del", self.name(node)], capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise RuntimeError(f"ip {' '.join(arguments)} failed: {done.stderr.strip()}")
