"""On the PYTHONPATH of a job under test: every process of it imports this at its start, and one of them fails
where MEGARL_TEST_FAULT says.

MEGARL_TEST_FAULT is JSON: `process` ("rank 1", "driver", "engine", "reward process") comes the `call`th time to `target`
("module:Class.method"), writes the file `hit`, and then does `action`: raise, SIGKILL and SIGSTOP (of
itself), sleep, or wait until the file `struck` is there, while the test does something to another process.

SILENT_FAULT is the name of a fault of silent.py that raises nothing by itself."""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools" / "planting"))
from after_import import after_import


def this_process() -> str:
    command = Path("/proc/self/cmdline").read_bytes()
    if b"pool_worker" in command:
        return "reward process"
    if b"multiprocessing.resource_tracker" in command:
        return "tracker"
    if "MEGARL_ENGINE_OF" in os.environ:
        return "engine"
    return f"rank {os.environ['RANK']}" if "RANK" in os.environ else "driver"


class Fault:
    """Wraps the target, and does what MEGARL_TEST_FAULT says at one of its calls."""

    def __init__(self, action: str, target: str, call: int, hit: str, struck: str, **_):
        self.action, self.call, self.hit, self.struck, self.calls = action, call, Path(hit), Path(struck), 0
        self.module, self.path = target.split(":")

    def plant(self, owner) -> None:
        *parents, name = self.path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        original = getattr(owner, name)

        def planted(*args, **kwargs):
            self.calls += 1
            if self.calls == self.call:
                self.happen()
            return original(*args, **kwargs)

        setattr(owner, name, planted)

    def happen(self) -> None:
        new = self.hit.with_suffix(f".{os.getpid()}")  # several processes may be hit at once
        new.write_text(json.dumps({"time": time.time(), "pid": os.getpid()}))
        new.rename(self.hit)
        match self.action:
            case "raise":
                raise RuntimeError("planted fault")
            case "SIGKILL" | "SIGSTOP":
                os.kill(os.getpid(), getattr(signal, self.action))
            case "sleep":
                time.sleep(1e6)
            case "wait":
                while not self.struck.exists():
                    time.sleep(0.01)


if "MEGARL_TEST_FAULT" in os.environ:
    wanted = json.loads(os.environ["MEGARL_TEST_FAULT"])
    if wanted.pop("process") == this_process():
        fault = Fault(**wanted)
        after_import(fault.module, fault.plant)
if "SILENT_FAULT" in os.environ:
    from silent import PLANTS

    if (fault := PLANTS.get(os.environ["SILENT_FAULT"])) and this_process().startswith(fault.process):
        after_import(fault.module, fault.plant)
