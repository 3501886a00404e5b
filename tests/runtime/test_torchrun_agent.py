"""An agent of torchrun that is lost can be replaced: `pytest tests/runtime/test_torchrun_agent.py -m nightly`"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

RANK = Path(__file__).with_name("replaced_rank.py")
GIVES_UP = (
    "keep_alive_interval=2,keep_alive_max_attempt=3"  # the rendezvous drops a lost agent after 6 s, not 15
)


@contextmanager
def agent(port: int, folder: Path, name: str) -> Iterator[subprocess.Popen]:
    """Run an agent of torchrun with one rank, in a session of its own. Its output is in the file `name`."""
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", GIVES_UP]
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", *where, str(RANK)]
    with (folder / name).open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "megarl.runtime.torchrun_agent", *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"ENDS": str(folder / "ends"), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen) -> None:
    """Kill an agent and its rank, as if the machine were lost."""
    if process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in (process.pid, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + 90
    while text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.1)


@pytest.mark.nightly
def test_a_new_agent_takes_the_place_of_a_lost_one(tmp_path):
    """torch's own agents wait here for an address that nobody publishes, until they give up after 60 s."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with agent(port, tmp_path, "first") as first:
        with agent(port, tmp_path, "second") as second:
            for name in ("first", "second"):
                wait_for(tmp_path / name, "attempt 0 of rank")
            kill(second)
        with agent(port, tmp_path, "third") as third:
            wait_for(tmp_path / "third", "attempt 1 of rank")
            (tmp_path / "ends").touch()
            for one, name in ((first, "first"), (third, "third")):
                assert one.wait(60) == 0, (tmp_path / name).read_text()
    assert (tmp_path / "first").read_text().count("attempt 1 of rank 0") == 1
    texts = [(tmp_path / name).read_text() for name in ("first", "second", "third")]
    assert len({name for text in texts for name in re.findall(r"^launcher (\w+)$", text, re.MULTILINE)}) == 1
