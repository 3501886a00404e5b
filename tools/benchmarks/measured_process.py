"""Run a command as a benchmark sees it: when each line came, how long it took, how much memory and CPU time it
and its children used."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_READ_INTERVAL_S = 0.5
_SEARCH_EVERY = (
    4  # readings: going through /proc costs milliseconds, and what is measured runs on the same cores
)


@dataclass
class Measured:
    started_at: float
    """time.time() of the start."""
    wall_s: float = 0.0
    peak_memory_bytes: int = 0
    """Largest sum of the peak resident memories (VmHWM) of all processes alive at one time. Shared pages
    count in each of them."""
    lines: list[tuple[float, str]] = field(default_factory=list)
    """(time.time() of its arrival, text) of every line of stdout and stderr."""
    cpu_seconds: list[tuple[float, float]] = field(default_factory=list)
    """(time.time(), CPU seconds of all processes so far) at each line that `note_cpu` chooses."""


class ProcessFailed(RuntimeError):
    """The command ended with an exit code other than 0."""


def run(
    command: list[str],
    log: Path,
    env: dict[str, str],
    note_cpu: Callable[[str], bool] = lambda line: False,
) -> Measured:
    """Run to the end, output into `log`. Raises: ProcessFailed with the end of the log if the exit code is
    not 0.

    Args:
        note_cpu: chooses the lines at whose arrival the CPU time is read."""
    measured = Measured(time.time())
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        ended = threading.Event()
        sampler = threading.Thread(target=_sample_memory, args=(process.pid, ended, measured), daemon=True)
        sampler.start()
        try:
            for line in process.stdout:
                measured.lines.append((time.time(), line.rstrip("\n")))
                file.write(line)
                if note_cpu(line):
                    measured.cpu_seconds.append(
                        (time.time(), sum(map(_cpu_seconds, _descendants(process.pid))))
                    )
            process.wait()
        finally:
            ended.set()
            if process.poll() is None:
                process.terminate()
                process.wait()
            sampler.join()
    measured.wall_s = time.time() - measured.started_at
    if process.returncode:
        tail = "\n".join(text for _, text in measured.lines[-20:])
        raise ProcessFailed(
            f"`{' '.join(command)}` ended with exit code {process.returncode}. The end of {log}:\n{tail}"
        )
    return measured


def _sample_memory(root: int, ended: threading.Event, measured: Measured) -> None:
    tree, reading = [root], 0
    while not ended.wait(_READ_INTERVAL_S):
        if reading % _SEARCH_EVERY == 0:
            tree = _descendants(root)
        reading += 1
        measured.peak_memory_bytes = max(
            measured.peak_memory_bytes, sum(_peak_rss_bytes(pid) for pid in tree)
        )


def _descendants(root: int) -> list[int]:
    """`root` and all below it."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _read(f"/proc/{name}/stat")):
            parent = int(stat.rpartition(")")[2].split()[1])  # the name in parentheses may hold anything
            children.setdefault(parent, []).append(int(name))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def _peak_rss_bytes(pid: int) -> int:
    """0 for a process that has ended."""
    match = re.search(r"VmHWM:\s+(\d+) kB", _read(f"/proc/{pid}/status"))
    return int(match[1]) * 1024 if match else 0


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of its children that have ended; 0 for one that has ended."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
