"""A whole job on two nodes with one fault planted, under torchrun or on a Ray cluster, and what is seen of it."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Sequence

from tests.e2e.jobs import replace_flags
from tests.faults.harness import Fault, Job, command_of
from tests.nodes.namespaces import Nodes, address
from tests.nodes.test_ray_nodes import RAY_NODE

INTO_FILES = ["bash", "-c", '"$@" > "$JOB_OUTPUT/stdout$NODE" 2> "$JOB_OUTPUT/stderr$NODE"', "job"]
# A node outlives what runs on it.
THEN_STAY = ["bash", "-c", '"$@"; echo $? > "$NODE_FOLDER/code"; sleep infinity', "node"]
TORCHRUN = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
OF_TORCHRUN = re.compile(
    r"^(\[rank\d+\]:)?\[?[WEI]\d{4} .*\n|^\*{10,}\n|^Setting OMP_NUM_THREADS.*\n|^Traceback[^\n]*\n  File \"<frozen runpy>(?s:.*)",
    re.MULTILINE,
)


class NodesJob(Job):
    """A job with one rank on each of two nodes, watched from outside of them.

    On a Ray cluster the processes of Ray itself, which stay, are not the job's; the actors that hold the
    ranks of a node are.

    Args:
        nodes: two nodes. Their folder is that of the job.
        launcher: "torchrun" or "ray".
        arguments: of `megarl train`, without those that say where it runs."""

    def __init__(self, nodes: Nodes, launcher: str, arguments: Sequence[str], fault: Fault | None = None):
        self.nodes, self.uses_ray = nodes, launcher == "ray"
        self._token = secrets.token_hex(24)
        super().__init__(nodes.folder, arguments, fault)

    def _launch(self, command: Sequence[str], env: dict[str, str]) -> subprocess.Popen:
        """Start the nodes, whose own processes do not have the mark of the job, and the job on them."""
        marks = env | {"JOB_OUTPUT": str(self.folder), "MEGARL_JOB_SECRET": secrets.token_hex(32)}
        marked = ["env", *(f"{name}={value}" for name, value in marks.items()), *INTO_FILES, sys.executable]
        start = self._start_on_ray if self.uses_ray else self._start_torchrun
        return [start(node, marked, command) for node in range(2)][0]

    def _start_torchrun(self, node: int, marked: list[str], arguments: Sequence[str]) -> subprocess.Popen:
        where = ("--rdzv-endpoint", f"{address(0)}:29500", "--local-addr", address(node))
        return self.nodes.start(
            node, [*THEN_STAY, *marked, *TORCHRUN, *where, "-m", "megarl.train", *arguments]
        )

    def _start_on_ray(self, node: int, marked: list[str], arguments: Sequence[str]) -> subprocess.Popen:
        where = ("--executor", "ray", "--nnodes", "2", "--nproc-per-node", "1")
        words = ["-m", "megarl.cli", "train", *replace_flags(list(arguments), list(where))]
        train = [*marked, *words] if node == 0 else []
        cluster = {
            "NODES": "2",
            "HEAD": address(0),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        }
        return self.nodes.start(node, ["bash", str(RAY_NODE), sys.executable, *train], **cluster)

    def _wait_for_launcher(self, seconds: float) -> None:
        """Do nothing: the nodes stay."""

    def _is_launcher(self, pid: int) -> bool:
        return False

    def alive(self) -> list[int]:
        found = super().alive()
        if self.uses_ray:
            of_nodes = {pid for node in range(2) for pid in self.nodes.pids(node)} - set(found)
            found += [pid for pid in of_nodes if command_of(pid).startswith(b"ray::RayNode")]
        return found

    def _exit_code(self) -> int | None:
        """Return the exit code of the job: the driver's on a Ray cluster, else the larger one of torchrun's."""
        codes = []
        for node in range(1 if self.uses_ray else 2):
            file = self.folder / f"node{node}" / "code"
            text = file.read_text().strip() if file.exists() else ""
            if not text:
                return None
            codes.append(int(text) if int(text) <= 128 else 128 - int(text))
        return max(codes, key=abs)

    def _shared_memory(self) -> set[str]:
        """Return the names in /dev/shm of the nodes that are there, each with its node."""
        names = set()
        for node in range(2):
            for pid in self.nodes.pids(node)[:1]:
                names |= {f"{node}:{name}" for name in os.listdir(f"/proc/{pid}/root/dev/shm")}
        return names

    def _left_in_shared_memory(self) -> list[str]:
        return sorted(name for name in self._shared_memory() if ":megarl" in name)

    def stdout(self) -> str:
        return self._output("stdout")

    def stderr(self) -> str:
        """Return what the job has said on both nodes, without torchrun's own lines."""
        return OF_TORCHRUN.sub("", self._output("stderr"))

    def _output(self, name: str) -> str:
        files = [self.folder / f"{name}{node}" for node in range(2)]
        return "".join(file.read_text() for file in files if file.exists())
