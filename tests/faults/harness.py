"""A whole job with one fault planted, and what is seen of it from outside: when its last process ended, what
it said, what it left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.launch import without_warnings_of_machine

HERE = Path(__file__).parent
SHM = Path("/dev/shm")
START_WITHIN_S = 240.0  # until the fault: imports and set-up on two busy cores; 10 s on free ones
AFTER_LIMIT_S = 8.0  # that processes are watched beyond their limit before they count as orphans


@dataclass(frozen=True)
class Fault:
    """What happens when `process` comes to `target` ("module:Class.method") for the `call`th time, to
    `victim` (default: to itself). resume_after_s: of a SIGSTOP."""

    kind: str
    process: str
    target: str
    call: int = 1
    victim: str | None = None
    resume_after_s: float | None = None


@dataclass
class Outcome:
    seconds: float
    """From the fault to the end of the last process; of those that ended."""
    exit_code: int | None
    """None: the job had to be killed."""
    stdout: str
    stderr: str
    orphans: list[str] = field(default_factory=list)
    """Commands of processes that were still there long after."""
    shared_memory: list[str] = field(default_factory=list)
    """Names in /dev/shm that nobody had before and nobody uses."""


class Job:
    """`command`'s processes: by their environment, and by who started whom (some write over their
    environment)."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        fault: Fault | None = None,
        env: dict[str, str] | None = None,
    ):
        self.folder, self.fault = folder, fault
        self.hit, self.struck = folder / "hit", folder / "struck"
        self.mark = f"MEGARL_TEST_JOB={uuid.uuid4()}"
        self._shm_before = self._shared_memory()
        name, value = self.mark.split("=")
        own = {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", name: value} | (env or {})
        if fault is not None:
            action = fault.kind if fault.victim is None else "wait"
            own |= {
                "PYTHONPATH": str(HERE / "planted"),
                "MEGARL_TEST_FAULT": json.dumps(
                    {
                        "action": action,
                        "process": fault.process,
                        "target": fault.target,
                        "call": fault.call,
                        "hit": str(self.hit),
                        "struck": str(self.struck),
                    }
                ),
            }
        self._seen: dict[int, int] = {}  # pid -> when it started
        self._others: dict[int, int] = {}  # likewise, of processes that are not the job's
        self.launcher = self._launch(command, own)
        self._watching = True
        self._lock = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _launch(self, command: Sequence[str], env: dict[str, str]) -> subprocess.Popen:
        own = {
            k: v
            for k, v in os.environ.items()
            if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        }
        with open(self.folder / "stdout", "wb") as out, open(self.folder / "stderr", "wb") as err:
            return subprocess.Popen(
                command,
                env=own | env,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                start_new_session=True,
            )

    def _wait_for_launcher(self, seconds: float) -> None:
        """Raises: subprocess.TimeoutExpired."""
        self.launcher.wait(seconds)

    def _shared_memory(self) -> set[str]:
        """Return the names of everything in /dev/shm."""
        return set(os.listdir(SHM))

    def _exit_code(self) -> int | None:
        return self.launcher.poll()

    def _watch(self) -> None:
        while self._watching:
            self.alive()
            time.sleep(1.0)

    def alive(self) -> list[int]:
        """Processes of the job that run or are stopped; not those that have ended and wait to be asked for
        their exit code."""
        with self._lock:
            now = _processes()
            for pid, (started, parent, _) in now.items():
                if started in (self._seen.get(pid), self._others.get(pid)):
                    continue
                ours = (
                    self._is_launcher(pid)
                    or parent in self._seen
                    and now.get(parent, (None,))[0] == self._seen[parent]
                )
                (self._seen if ours or self._is_marked(pid) else self._others)[pid] = started
            return [
                pid
                for pid, started in self._seen.items()
                if (p := now.get(pid)) and p[0] == started and p[2] not in "ZX"
            ]

    def _is_launcher(self, pid: int) -> bool:
        return pid == self.launcher.pid

    def _is_marked(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False

    def find(self, who: str) -> int:
        """The process of the job that is "rank 1", "driver", "engine" or "reward process"."""
        found = [pid for pid in self.alive() if _who(pid) == who]
        if who == "driver":  # beside rank 0, or the process that the user started
            ours = (b"megarl.trainer\0", b"megarl.cli\0train\0")
            found = [pid for pid in found if command_of(pid).partition(b"-m\0")[2].startswith(ours)]
        assert found, f"no {who} among {[self.describe(pid) for pid in self.alive()]}"
        return found[0]

    def describe(self, pid: int) -> str:
        return f"{pid} {_who(pid)}: {command_of(pid).replace(bytes(1), b' ').decode()[:150]}"

    def wait_for_hit(self) -> float:
        """Until the planted place is reached; then, if the victim is another process, strike it. Returns the
        time of the fault."""
        deadline = time.time() + START_WITHIN_S
        while not self.hit.exists():
            ended = self._exit_code()
            assert ended is None and time.time() < deadline, (
                f"the fault was not reached (exit code {ended}):\n{self.stderr()}"
            )
            time.sleep(0.02)
        hit = json.loads(self.hit.read_text())["time"]
        if self.fault.victim is not None:
            victim = self.find(self.fault.victim)
            os.kill(victim, getattr(signal, self.fault.kind))
            hit = time.time()
            self.struck.touch()
            if self.fault.resume_after_s is not None:
                time.sleep(self.fault.resume_after_s)
                os.kill(victim, signal.SIGCONT)
        return hit

    def watch_end(self, since: float, limit_s: float) -> Outcome:
        """Wait until all processes are gone, at most limit_s from `since` and a little more; end those that
        are not."""
        last = since
        while (alive := self.alive()) and time.time() < since + limit_s + AFTER_LIMIT_S:
            last = time.time()
            self.launcher.poll()
            time.sleep(0.1)
        seconds = time.time() - since if alive else last - since
        orphans = [self.describe(pid) for pid in alive]
        if not alive:  # a process that /proc calls a zombie can be waited for once its last thread has ended
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._wait_for_launcher(5)
        exit_code, left = self._exit_code(), self._left_in_shared_memory()
        for _ in range(25):  # what another test has made and nobody uses at this moment is soon gone
            if not left:
                break
            time.sleep(0.2)
            left = [name for name in left if name in self._left_in_shared_memory()]
        self.end()
        stderr = without_warnings_of_machine(self.stderr())
        return Outcome(seconds, exit_code, self.stdout(), stderr, orphans, left)

    def _left_in_shared_memory(self) -> list[str]:
        new = self._shared_memory() - self._shm_before
        used = _used_shared_memory() if new else set()
        pids = {str(pid) for pid in self._seen}
        return [
            name
            for name in new
            if name not in used
            and (SHM / name).exists()
            and (not name.startswith("megarl-") or name.split("-")[1] in pids)
        ]

    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def end(self) -> None:
        self._watching = False
        self._watcher.join()
        for _ in range(3):
            for pid in self.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        self._wait_for_launcher(10)


def _processes() -> dict[int, tuple[int, int, str]]:
    """pid -> (start time in ticks, parent, state)"""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                found[int(entry)] = int(fields[19]), int(fields[1]), fields[0]
    return found


def command_of(pid: int) -> bytes:
    """Return the command line of a process, its arguments ended by zero bytes; empty if there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _who(pid: int) -> str:
    """As planted/sitecustomize.py says it of itself."""
    try:
        env = dict(
            e.split(b"=", 1) for e in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in e
        )
    except OSError:
        return "gone"
    command = command_of(pid)
    if b"pool_worker" in command:
        return "reward process"
    if b"multiprocessing.resource_tracker" in command:
        return "tracker"
    if b"MEGARL_ENGINE_OF" in env:
        return "engine"
    return f"rank {env[b'RANK'].decode()}" if b"RANK" in env else "driver"


def _used_shared_memory() -> set[str]:
    """Names in /dev/shm that some process of the machine has mapped or open."""
    used: set[str] = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{entry}/maps").read_text().splitlines()
                used |= {line.split("/dev/shm/", 1)[1].split(" ")[0] for line in maps if "/dev/shm/" in line}
                for fd in os.listdir(f"/proc/{entry}/fd"):
                    with contextlib.suppress(OSError):
                        if (target := os.readlink(f"/proc/{entry}/fd/{fd}")).startswith("/dev/shm/"):
                            used.add(target.removeprefix("/dev/shm/").split(" ")[0])
    return used


def megarl(command: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", "-m", "megarl.cli", command, *arguments]
