"""The driver's listeners while this process may open no further file. `pytest tests/runtime/test_acceptor.py`"""

import contextlib
import logging
import resource
import socket
import time

import pytest

from megarl.runtime.channel import CHALLENGE_BYTES, CHILD, frame, sign_in_name
from megarl.runtime import signing
from megarl.runtime.job_store import LOOPBACK
from megarl.runtime.node_watch import NodeWatch
from megarl.runtime.relay import CommandTree


@contextlib.contextmanager
def no_further_file():
    """The open files stay open, and no number is left for another one. (With 0 poll(2) of one file would fail too.)"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def cpu_seconds(thread) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def command_tree():
    return CommandTree(LOOPBACK, 1, lambda reports: None)


def node_watch():
    return NodeWatch(LOOPBACK, lambda node, reason: None, lambda node, rank: None)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("listening", [command_tree, node_watch])
def test_a_connection_waits_without_a_busy_loop_until_it_can_be_accepted(listening, caplog):
    watch = listening()
    host, port = watch.address.split(":")
    known, late = (socket.create_connection((host, int(port)), 30.0), socket.socket())
    assert len(known.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
    before = cpu_seconds(watch._thread)
    with no_further_file():
        late.connect((host, int(port)))
        late.settimeout(1.5)
        with pytest.raises(TimeoutError):
            late.recv(1)
        spent = cpu_seconds(watch._thread) - before
    assert spent < 0.1, (
        f"a busy loop of {spent} s"
    )  # 1.5 s where a core is free; a try per second takes microseconds
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1 and "Too many open files. A limit on open files (ulimit -n)" in told[0]
    late.settimeout(30.0)
    assert len(late.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
    assert caplog.records[-1].getMessage() == "connections are accepted again"
    for connection in (known, late):
        connection.close()
    watch.close()


@pytest.mark.timeout(60)
def test_processes_that_are_connected_get_commands_meanwhile():
    tree = command_tree()
    host, port = tree.address.split(":")
    child, late = socket.create_connection((host, int(port)), 30.0), socket.socket()
    challenge = child.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
    child.sendall(frame(signing.sign(CHILD, sign_in_name(challenge))))
    assert child.recv(1) == b"+"
    with no_further_file():
        late.connect((host, int(port)))
        time.sleep(0.2)
        start = time.monotonic()
        for number in range(20):
            tree.post(bytes([number]))
            assert child.recv(9, socket.MSG_WAITALL) == frame(bytes([number]))
        assert time.monotonic() - start < 10.0  # milliseconds; if each waited for the acceptor's pause, 20 s
    tree.close()
    child.close()
    late.close()
