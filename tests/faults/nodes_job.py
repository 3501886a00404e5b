"""A whole job on two nodes with one fault planted, under torchrun or on a Ray cluster, and what is seen of it."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Sequence

from tests.faults.harness import Fault, Job, command_of
from tests.nodes.namespaces import Nodes, address
from tests.nodes.test_ray_nodes import RAY_NODE

# Below a shell: nothing inside a process namespace can kill its first process.
INTO_FILES = ["bash", "-c", '"$@" > "$JOB_OUTPUT/stdout$NODE" 2> "$JOB_OUTPUT/stderr$NODE"; exit $?', "job"]
TORCHRUN = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
OF_TORCHRUN = re.compile(
    r"^[WEI]\d{4} .*\n|^\*{10,}\n|^Setting OMP_NUM_THREADS.*\n|^Traceback[^\n]*\n  File \"<frozen runpy>(?s:.*)",
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
        super().__init__(nodes.folder, arguments, fault)

    def _launch(self, command: Sequence[str], env: dict[str, str]) -> subprocess.Popen:
        own = env | {"JOB_OUTPUT": str(self.folder)}
        self._processes = (self._launch_ray if self.uses_ray else self._launch_torchrun)(command, own)
        return self._processes[0]

    def _launch_torchrun(self, arguments: Sequence[str], env: dict[str, str]) -> list[subprocess.Popen]:
        env["MEGARL_JOB_SECRET"] = secrets.token_hex(32)
        started = []
        for node in range(2):
            where = ("--rdzv-endpoint", f"{address(0)}:29500", "--local-addr", address(node))
            torchrun = [sys.executable, *TORCHRUN, *where, "-m", "megarl.train", *arguments]
            started.append(self.nodes.start(node, [*INTO_FILES, *torchrun], **env))
        return started

    def _launch_ray(self, arguments: Sequence[str], env: dict[str, str]) -> list[subprocess.Popen]:
        """Start the cluster, without the mark of the job, and the job on its head."""
        where = ("--executor", "ray", "--nnodes", "2", "--nproc-per-node", "1")
        marked = ["env", *(f"{name}={value}" for name, value in env.items()), *INTO_FILES]
        train = [sys.executable, "-m", "megarl.cli", "train", *arguments, *where]
        cluster = {
            "NODES": "2",
            "HEAD": address(0),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(24),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        }
        node = ["bash", str(RAY_NODE), sys.executable]
        return [
            self.nodes.start(0, [*node, *marked, *train], **cluster),
            self.nodes.start(1, node, **cluster),
        ]

    def _wait_for_launcher(self, seconds: float) -> None:
        for process in () if self.uses_ray else self._processes:  # the nodes of a cluster stay
            process.wait(seconds)

    def _is_launcher(self, pid: int) -> bool:
        return not self.uses_ray and pid in [process.pid for process in self._processes]

    def alive(self) -> list[int]:
        found = super().alive()
        if self.uses_ray:
            of_nodes = {pid for node in range(2) for pid in self.nodes.pids(node)} - set(found)
            found += [pid for pid in of_nodes if command_of(pid).startswith(b"ray::RayNode")]
        return found

    def _exit_code(self) -> int | None:
        """Return the exit code of the job: on a Ray cluster the driver's, else the larger of the two nodes'."""
        if self.uses_ray:
            file = self.folder / "node0" / "code"
            text = file.read_text().strip() if file.exists() else ""
            return None if not text else int(text) if int(text) <= 128 else 128 - int(text)
        codes = [process.poll() for process in self._processes]
        return None if None in codes else max(codes)

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
