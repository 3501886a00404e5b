"""A lost node is reported by its name and ranks, and what only looks like one is not.

tests/nodes/test_node_watch.py cuts real links."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from megarl.runtime import node_watch, node_watch_process
from megarl.runtime.process_tree import agent_of
from megarl.runtime.keep_alive import KeepAlive
from megarl.runtime.messages import Failure
from megarl.runtime.node_watch import Node, NodeWatch
from megarl.runtime.signing import JOB_SECRET, job_secret
from megarl.runtime.store_executor import Nodes, StoreExecutor

SCRIPT = Path(__file__).with_name("watched_node.py")
SHORT, USUAL = KeepAlive(1, 1, 2), KeepAlive()


def until(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)


def limits(keep_alive: KeepAlive) -> list[str]:
    return [str(n) for n in (keep_alive.idle_s, keep_alive.interval_s, keep_alive.probes)]


def watch_processes(pid: int) -> list[int]:
    """Ids of the watch processes of a rank."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in children if b"node_watch_process" in Path(f"/proc/{c}/cmdline").read_bytes()]


@pytest.fixture
def start(tmp_path):
    """Start processes of watched_node.py; all of them end with the test."""
    env = os.environ | {JOB_SECRET: job_secret()}
    started: list[subprocess.Popen] = []

    def start(*arguments: object) -> subprocess.Popen:
        what, *rest = map(str, arguments)
        command = [sys.executable, "-P", str(SCRIPT), what, str(tmp_path), *rest]
        started.append(subprocess.Popen(command, env=env))
        return started[-1]

    yield start
    (tmp_path / "end").touch()
    for process in started:
        process.send_signal(signal.SIGCONT)
        process.wait(10)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "keep_alive, hold_s, stop_s",
    [(SHORT, 5, 5.0), pytest.param(USUAL, 60, 30.0, marks=pytest.mark.nightly)],
)
def test_a_held_lock_and_a_stopped_driver_are_no_lost_node_and_a_kill_is(
    start, tmp_path, keep_alive, hold_s, stop_s
):
    assert hold_s > keep_alive.limit_s and stop_s > keep_alive.limit_s
    driver = start("driver", "127.0.0.1", *limits(keep_alive))
    start("agent", 3, hold_s, *limits(keep_alive))
    until((tmp_path / "rank_3").exists, 20)
    rank = int((tmp_path / "rank_3").read_text())
    until(lambda: watch_processes(rank), 5)
    time.sleep(1.0)  # the watch has signed in
    driver.send_signal(signal.SIGSTOP)
    time.sleep(stop_s)
    driver.send_signal(signal.SIGCONT)
    until((tmp_path / "held_3").exists, hold_s)
    time.sleep(1.0)
    assert not (tmp_path / "lost").exists()
    killed = time.time()
    for pid in (*watch_processes(rank), rank):
        os.kill(pid, signal.SIGKILL)
    until((tmp_path / "lost").exists, 5)
    (lost,) = map(json.loads, (tmp_path / "lost").read_text().splitlines())
    assert (lost["node"], lost["ranks"]) == (socket.gethostname(), [3])
    assert lost["time"] - killed < 1.0 and lost["reason"].startswith("all its processes have ended")


@pytest.mark.timeout(60)
def test_the_end_of_a_rank_is_told_and_is_not_the_loss_of_its_node(start, tmp_path):
    start("driver", "127.0.0.1", *limits(SHORT))
    agent = start("agent", 1, 0, *limits(SHORT))
    until((tmp_path / "held_1").exists, 20)
    rank = int((tmp_path / "rank_1").read_text())
    (watch,) = watch_processes(rank)
    time.sleep(1.0)
    os.kill(rank, signal.SIGKILL)
    agent.wait(10)
    until(lambda: not Path(f"/proc/{watch}").exists(), 5)
    until((tmp_path / "ended").exists, 5)
    assert not (tmp_path / "lost").exists()
    assert json.loads((tmp_path / "ended").read_text()) == [socket.gethostname(), 1]


@pytest.mark.timeout(60)
def test_a_stopped_rank_does_not_outlive_the_driver(start, tmp_path):
    driver = start("driver", "127.0.0.1", *limits(SHORT))
    agent = start("agent", 1, 0, *limits(SHORT))
    until((tmp_path / "held_1").exists, 20)
    rank = int((tmp_path / "rank_1").read_text())
    (watch,) = watch_processes(rank)
    time.sleep(1.0)  # the watch has signed in
    os.kill(rank, signal.SIGSTOP)
    driver.kill()
    assert agent.wait(10) != 0
    until(lambda: not Path(f"/proc/{watch}").exists(), 5)


@pytest.mark.timeout(60)
def test_a_rank_that_ends_before_its_watch_looks_is_told_too(start, tmp_path):
    start("driver", "127.0.0.1", *limits(SHORT))
    until((tmp_path / "address").exists, 20)
    gone = subprocess.Popen(["true"])
    gone.wait()
    module = ["-m", "megarl.runtime.node_watch_process"]
    where = [(tmp_path / "address").read_text(), str(gone.pid), "1", "1", *limits(SHORT)]
    watch = subprocess.run(
        [sys.executable, "-P", *module, *where],
        env=os.environ | {JOB_SECRET: job_secret()},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (watch.returncode, watch.stderr) == (0, "")
    until((tmp_path / "ended").exists, 5)
    assert json.loads((tmp_path / "ended").read_text()) == [socket.gethostname(), 1]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("when", ["before the watch looks", "together with the first rank"])
def test_of_two_ranks_the_one_is_told_that_is_not_the_first(start, tmp_path, when):
    """torchrun, here this process, kills the first rank because the second one has ended."""
    start("driver", "127.0.0.1", *limits(SHORT))
    until((tmp_path / "address").exists, 60)
    env = os.environ | {JOB_SECRET: job_secret(), "TORCHELASTIC_RUN_ID": str(tmp_path)}
    first, second = (subprocess.Popen(["sleep", "300"], env=env | {"RANK": str(rank)}) for rank in (1, 2))
    if when == "before the watch looks":
        second.kill()
        second.wait()
    where = [(tmp_path / "address").read_text(), str(first.pid), "1", "2", *limits(SHORT)]
    command = [sys.executable, "-P", "-m", "megarl.runtime.node_watch_process", *where]
    watch = subprocess.Popen(command, env=env)
    try:
        if when == "together with the first rank":
            until(lambda: num_pidfds(watch.pid) == 2, 60)
            watch.send_signal(signal.SIGSTOP)
            for rank in (second, first):
                rank.kill()
                rank.wait()
            watch.send_signal(signal.SIGCONT)
        assert watch.wait(60) == 0
        until((tmp_path / "ended").exists, 60)
        assert json.loads((tmp_path / "ended").read_text()) == [socket.gethostname(), 2]
    finally:
        for process in (watch, first, second):
            process.kill()
            process.wait()


def num_pidfds(pid: int) -> int:
    """Number of processes whose end this process can wait for."""
    found = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # of the listing itself
            found += os.readlink(descriptor) == "anon_inode:[pidfd]"
    return found


@pytest.mark.timeout(120)
def test_ranks_that_are_started_through_another_program_are_watched(start, tmp_path):
    """`nsys profile` starts the rank as a child of its own, with the same environment."""
    start("driver", "127.0.0.1", *limits(SHORT))
    until((tmp_path / "address").exists, 60)
    env = os.environ | {JOB_SECRET: job_secret(), "TORCHELASTIC_RUN_ID": str(tmp_path)}
    profiled = ["sh", "-c", f"sleep 300 & echo $! > {tmp_path}/pid_$RANK; wait"]
    first, second = (subprocess.Popen(profiled, env=env | {"RANK": str(rank)}) for rank in (1, 2))
    until(lambda: all((tmp_path / f"pid_{rank}").exists() for rank in (1, 2)), 60)
    until(lambda: all((tmp_path / f"pid_{rank}").read_text().endswith("\n") for rank in (1, 2)), 60)
    ranks = [int((tmp_path / f"pid_{rank}").read_text()) for rank in (1, 2)]
    where = [(tmp_path / "address").read_text(), str(ranks[0]), "1", "2", *limits(SHORT)]
    command = [sys.executable, "-P", "-m", "megarl.runtime.node_watch_process", *where]
    watch = subprocess.Popen(command, env=env)
    try:
        until(lambda: num_pidfds(watch.pid) == 2, 60)
        time.sleep(1.0)
        assert not (tmp_path / "ended").exists() and watch.poll() is None
        os.kill(ranks[1], signal.SIGKILL)
        assert watch.wait(60) == 0
        until((tmp_path / "ended").exists, 60)
        assert json.loads((tmp_path / "ended").read_text()) == [socket.gethostname(), 2]
    finally:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in (watch, first, second):
            process.kill()
            process.wait()


@pytest.mark.timeout(120)
def test_ranks_under_another_program_are_ended_with_their_node(tmp_path, monkeypatch):
    """Also a rank with a process group of its own, which the end of the program would not reach."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", str(tmp_path))
    rank = f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 300"
    profiler = f"import subprocess; subprocess.run(['sh', '-c', {rank!r}], process_group=0)"
    agent = (
        "import os, subprocess, sys\n"
        "env = os.environ | {'RANK': '0'}\n"
        f"subprocess.run([sys.executable, '-c', {profiler!r}], env=env, start_new_session=True)\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "RANK"}
    process = subprocess.Popen([sys.executable, "-c", agent], env=env)
    until((tmp_path / "pid").exists, 60)
    pid = int((tmp_path / "pid").read_text())
    ended = os.pidfd_open(pid)
    try:
        assert agent_of(pid) == process.pid
        node_watch_process._end_node(process.pid)
        assert select.select([ended], [], [], 30)[0]
    finally:
        os.close(ended)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


@pytest.mark.timeout(60)
def test_the_death_of_a_rank_is_reported_before_what_it_makes_of_its_peers(start, tmp_path):
    """A killed rank makes the collectives of the others raise at once, before its end counts as silent."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    executor = StoreExecutor({"actor": [0, 1]}, 2, 60.0, store, nodes=Nodes("127.0.0.1", 1))
    executor.death_first_s = 0.5  # as in a job
    executor.watch_nodes()
    assert executor._node_watch is not None
    (tmp_path / "address").write_text(executor._node_watch.address)
    start("agent", 1, 0, *limits(SHORT))
    until((tmp_path / "held_1").exists, 20)
    time.sleep(1.0)  # the watch has signed in
    os.kill(int((tmp_path / "rank_1").read_text()), signal.SIGKILL)
    executor._take_failure(0, Failure("actor", "update", "step 3", "RuntimeError: gloo: Read error", ""))
    executor._end()
    assert str(executor.failure).startswith("[rank 1] has ended on node ")


def test_only_nodes_that_know_the_secret_are_listened_to(caplog):
    lost: list[Node] = []
    watch = NodeWatch("127.0.0.1", lambda node, _: lost.append(node), lambda node, _: lost.append(node))
    host, port = watch.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        assert len(connection.recv(16)) == 16
        connection.sendall(b"00" * 64 + b"\n")
        assert connection.recv(1) == b""
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.recv(16)
    watch.close()
    assert lost == [] and "not from a node of this job" in caplog.text


def test_a_connection_that_does_not_sign_in_is_closed(monkeypatch):
    monkeypatch.setattr(node_watch, "SIGN_IN_S", 0.5)
    watch = NodeWatch("127.0.0.1", lambda node, _: None, lambda node, _: None)
    host, port = watch.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=200) as connection:
        assert len(connection.recv(16, socket.MSG_WAITALL)) == 16
        assert connection.recv(1) == b""
    watch.close()


def test_a_watch_may_be_closed_again():
    """A signal during the end of a job makes the driver kill the ranks after it has closed the watch."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    executor = StoreExecutor({"actor": [0]}, 1, 60.0, store, nodes=Nodes("127.0.0.1", 1))
    executor.watch_nodes()
    executor._end()
    executor.kill(130)
    assert store.get("kill") == b"1"
