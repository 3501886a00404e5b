"""All processes of an agent end with it, with its episode, and with the process that started it.

pytest tests/episodes/test_agent_process.py"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.episodes import agent_process

GUARD = [sys.executable, "-I", "-S", agent_process.__file__]
AGENT = """
import os, subprocess, sys, time
how, mark = sys.argv[1:]
sleep = [sys.executable, "-c", "import time; time.sleep(600)", mark]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
if os.fork() == 0:  # a daemon: it has no parent left
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execv(sleep[0], sleep)
print("started", flush=True)
if how == "waits":
    time.sleep(600)
if how == "dies":
    os.abort()
sys.exit(3)
"""


def of_mark(mark: str) -> list[int]:
    """The processes with this argument that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "cmdline").read_text().split("\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start(how: str, mark: str) -> subprocess.Popen[bytes]:
    command = [*GUARD, str(os.getpid()), sys.executable, "-c", AGENT, how, mark]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"started\n"
    return process


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "how, code", [("ends", 3), ("dies", -signal.SIGABRT), ("waits", 128 + signal.SIGTERM)]
)
def test_nothing_is_left_of_an_agent(how: str, code: int) -> None:
    mark = f"test-{how}-{os.getpid()}"
    process = start(how, mark)
    if how == "waits":
        wait_until(lambda: len(of_mark(mark)) == 5)  # guard, agent, and its three children
        process.terminate()
    assert process.wait(60) == code
    assert of_mark(mark) == []


@pytest.mark.timeout(180)
def test_nothing_is_left_where_the_process_that_started_it_is_killed() -> None:
    mark = f"test-killed-{os.getpid()}"
    pool = os.fork()
    if pool == 0:
        start("waits", mark)
        time.sleep(600)
        os._exit(0)
    wait_until(lambda: len(of_mark(mark)) == 5)
    os.kill(pool, signal.SIGKILL)
    os.waitpid(pool, 0)
    wait_until(lambda: of_mark(mark) == [])


def test_a_command_that_does_not_exist_is_named() -> None:
    done = subprocess.run([*GUARD, str(os.getpid()), "/nowhere"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("--agent-command: /nowhere cannot be run: ")
