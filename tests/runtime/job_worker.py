"""The ranks of the jobs in test_torchrun.py: `-m job_worker SCENARIO FOLDER`, two ranks, roles actor (0, 1),
left (0), right (1)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

START = time.time()

import torch
import torch.distributed as dist

from megarl.runtime.torchrun import start_driver
from megarl.runtime.abort import ABORT
from megarl.runtime.mailbox import connect, world_store
from megarl.runtime.process import DRIVER_PID, end_on_signals, end_with_parent
from megarl.runtime.worker_loop import serve


class Role:
    def __init__(self, name: str, notes: list, folder: Path):
        self.name, self.notes, self.folder, self.rank = name, notes, folder, dist.get_rank()

    def setup(self):
        return os.getpid()

    def echo(self, *args, **kwargs):
        return [args, kwargs]

    def note(self, i: int):
        self.notes.append([self.name, i])

    def read_notes(self):
        return self.notes

    def sleep(self, seconds: float):
        start = time.monotonic()
        time.sleep(seconds)
        return [start, time.monotonic()]

    def generate(self, seconds: float):
        """What can be left."""
        for _ in range(int(seconds / 0.02)):
            ABORT.check()
            time.sleep(0.02)

    def use_child(self, seconds: float):
        """As an engine in a process of its own, which SIGTERM ends."""
        if subprocess.run(["sleep", str(seconds)], check=False).returncode != 0:
            raise RuntimeError("the engine has died")

    def double(self, data: bytes):
        return data + data

    def append(self, items: list):
        items.append("seen")
        return items

    def mean(self, value: float):
        total = torch.tensor([value * (self.rank + 1)])
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def die(self, bad_rank: int):
        """While the other rank waits for it in a collective."""
        if self.rank == bad_rank:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.mean(1.0)

    def update(self, bad_rank: int):
        """A collective that rank `bad_rank` does not reach."""
        if self.rank == bad_rank:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            (self.folder / f"failed_at_{attempt}").write_text(str(time.time()))
            raise ValueError(f"learning rate ({-1}) must be positive")
        return self.mean(1.0)


def main(scenario: str, folder: str) -> int:
    end_on_signals()
    rank = int(os.environ["RANK"])
    (Path(folder) / f"start_{rank}_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}").write_text(
        str(START)
    )
    if driver_pid := os.environ.get(DRIVER_PID):
        end_with_parent(int(driver_pid))
    driver = start_driver([scenario, folder], module="job_driver") if rank == 0 and not driver_pid else None
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=world_store(30.0), rank=rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    code = serve(lambda context: build_roles(scenario, Path(folder)), rank, connect(timeout_s=30), driver)
    dist.destroy_process_group()
    return code


def build_roles(scenario: str, folder: Path) -> dict[str, object]:
    if scenario == "chain" and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "5":
        (folder / "failed_at_5").write_text(str(time.time()))
        raise ValueError("num_layers (0) must be at least 1.")
    notes: list = []
    return {
        name: Role(name, notes, folder) for name in ("actor", "left" if dist.get_rank() == 0 else "right")
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
