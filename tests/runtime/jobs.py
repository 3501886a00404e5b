"""Jobs of real processes, found by a mark in their environment: whatever one leaves behind is seen, and
removed."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from tests.launch import preloaded_python

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
DRIVER = [sys.executable, "-P", "-m", "job_driver"]
END_WITHIN_S = 25.0
"""From a failure until the last process of the attempt is gone, on a machine that has other work to do.

Users are promised 10 s, which tests/faults measures. What would take half a minute is torchrun's own kill."""
START_WITHIN_S = 45.0  # torch imports in four processes on two busy cores


def preloaded(command: list[str]) -> list[str]:
    """The command with an interpreter that has imported everything (tests/launch.py), for jobs whose subject
    is neither how processes start nor what signals do to them. The nightly run starts these anew too."""
    return [preloaded_python(), *command[1:]]


class Job:
    """A job in its own session, like a terminal would start it, and all its processes."""

    def __init__(self, folder: Path):
        self.folder, self.mark = folder, f"MEGARL_TEST_JOB={uuid.uuid4()}"
        self.processes: list[subprocess.Popen] = []

    def start(self, command: list[str], **env: str) -> subprocess.Popen:
        name, value = self.mark.split("=")
        own = {
            k: v
            for k, v in os.environ.items()
            if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MEGARL_JOB_SECRET")
        }
        own |= {"PYTHONPATH": str(HERE), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", name: value} | env
        with open(self.folder / "stdout", "ab") as out, open(self.folder / "stderr", "ab") as err:
            process = subprocess.Popen(
                command, env=own, stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.processes.append(process)
        return process

    def alive(self) -> list[int]:
        """Processes of the job that are running, by their environment."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(
                    b"\0"
                ):
                    found.append(int(entry.name))
            except OSError:  # ended meanwhile, or someone else's
                continue
        return found

    def wait_until_gone(self, seconds: float) -> float:
        """Seconds since the epoch at which the last process was seen; fails after `seconds`."""
        deadline = time.time() + seconds
        while self.alive():
            assert time.time() < deadline, f"still running: {self.describe()}\n{self.stderr()}"
            time.sleep(0.1)
        return time.time()

    def wait_for(self, name: str) -> None:
        deadline = time.time() + START_WITHIN_S
        while not (self.folder / name).exists():
            assert time.time() < deadline and self.processes[0].poll() is None, self.stderr()
            time.sleep(0.05)

    def describe(self) -> list[str]:
        return [f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes().decode()}" for pid in self.alive()]

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def seen(self, name: str = "seen.json"):
        return json.loads(self.read(name))

    def end(self) -> None:
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(10)
