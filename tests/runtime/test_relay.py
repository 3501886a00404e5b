"""Commands and reports through the tree of relays, over real sockets. `pytest tests/runtime/test_relay.py`

Relays run on threads of this process, but for the tests of their process."""

import os
import queue
import socket
import subprocess
import sys
import threading
import time

import pytest

from megarl.runtime import relay, signing
from megarl.runtime.channel import CHALLENGE_BYTES, CHILD, Channel, ConnectionLost, frame, sign_in, split
from megarl.runtime.job_store import LOOPBACK
from megarl.runtime.messages import (
    Call,
    Event,
    Kill,
    read_command,
    read_report,
    signed_command,
    signed_report,
)
from megarl.runtime.relay import CommandTree, Relay, children_of, listen, parent_of
from megarl.runtime.signing import ForgedMessage, SecretError

LARGE = 5 << 20  # bytes: more than the buffers of a connection hold


@pytest.mark.parametrize("num_nodes", [1, 15, 16, 17, 128, 512, 5000])
def test_every_node_has_one_parent_and_few_children(num_nodes):
    parents = {child: None for child in children_of(None, num_nodes)}
    for node in range(num_nodes):
        parents |= {child: node for child in children_of(node, num_nodes)}
    assert parents == {node: parent_of(node) for node in range(num_nodes)}
    counts = [len(children_of(node, num_nodes)) for node in (None, *range(num_nodes))]
    assert max(counts) <= relay.FAN_OUT and sum(counts) == num_nodes
    assert all(parent is None or parent < node for node, parent in parents.items())


class Tree:
    """A driver, relays of nodes with ranks each, and the ranks' channels."""

    def __init__(self, num_nodes: int, ranks_per_node: int):
        self.reports: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.root = CommandTree(LOOPBACK, len(children_of(None, num_nodes)), self.reports.put)
        self.addresses, self.threads = {None: self.root.address}, []
        for node in range(num_nodes):
            listener = listen(LOOPBACK)
            self.addresses[node] = f"{LOOPBACK}:{listener.getsockname()[1]}"
            num_children = ranks_per_node + len(children_of(node, num_nodes))
            upstream = sign_in(self.addresses[parent_of(node)], CHILD)
            thread = threading.Thread(target=Relay(listener, num_children, upstream).run, daemon=True)
            thread.start()
            self.threads.append(thread)

    def channel(self, node: int | None = None) -> Channel:
        return Channel(self.addresses[node])

    def take_reports(self, count: int) -> list[bytes]:
        found: list[bytes] = []
        while len(found) < count:
            found += map(bytes, split(self.reports.get(timeout=200.0)))
        return found


@pytest.mark.timeout(300)
def test_every_rank_gets_every_command_and_every_report_arrives(monkeypatch):
    monkeypatch.setattr(relay, "FAN_OUT", 2)
    tree, num_nodes, per_node = Tree(7, 2), 7, 2  # three levels: 2 + 4 + 1 nodes
    sent = [bytes([i]) * (i * 37) for i in range(50)] + [os.urandom(LARGE), b"last"]
    tree.root.post(sent[0])  # before any rank is there
    channels = [tree.channel(node) for node in range(num_nodes) for _ in range(per_node)]
    for message in sent[1:]:
        tree.root.post(message)
    received: dict[int, list[bytes]] = {}

    def run_rank(rank: int) -> None:
        received[rank] = [channels[rank].next_message() for _ in sent]
        for number in range(20):
            channels[rank].report(bytes([rank, number]) + b"x" * (1000 * number))
        channels[rank].report(bytes([rank, 20]) + bytes(LARGE))

    ranks = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(len(channels))]
    for rank in ranks:
        rank.start()
    reports = tree.take_reports(21 * len(channels))
    for rank in ranks:
        rank.join()
    assert all(found == sent for found in received.values()) and len(received) == 14
    for rank in range(len(channels)):
        of_rank = [report for report in reports if report[0] == rank]
        assert [report[1] for report in of_rank] == list(range(21)), rank
        assert [len(report) for report in of_rank] == [*(2 + 1000 * i for i in range(20)), 2 + LARGE]
    assert not any(channel.has_message() for channel in channels)
    tree.root.close()
    for thread in tree.threads:
        thread.join(200.0)
        assert not thread.is_alive()
    with pytest.raises(ConnectionLost):
        channels[0].next_message()


class Store(dict):
    """Stands in for the job's store. What is not set raises KeyError instead of being waited for."""

    get = dict.__getitem__

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()


def test_the_first_rank_of_a_node_starts_the_relay_for_its_ranks(monkeypatch):
    """Relays in processes of their own. The second node gets its commands from the first, whose ranks are not the
    driver's children."""
    monkeypatch.setattr(relay, "FAN_OUT", 1)
    tree = CommandTree(LOOPBACK, 1, (reports := queue.SimpleQueue()).put)
    store = Store({relay.DRIVER_ADDRESS: tree.address.encode()})
    channels = []
    for node, local_rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        env = {"GROUP_WORLD_SIZE": "2", "GROUP_RANK": str(node), "LOCAL_RANK": str(local_rank)}
        env |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": "1"}
        channels.append(relay.open_channel(store, os.environ | env))
    assert len({*store.values()}) == len(store) == 3 and store[relay.DRIVER_ADDRESS] == tree.address.encode()
    tree.post(b"command")
    assert [channel.next_message() for channel in channels] == [b"command"] * 4
    for number, channel in enumerate(channels):
        channel.report(b"from %d" % number)
    found = []
    while len(found) < 4:
        found += map(bytes, split(reports.get(timeout=200.0)))
    assert sorted(found) == [b"from 0", b"from 1", b"from 2", b"from 3"]
    tree.close()
    with pytest.raises(ConnectionLost):
        channels[3].next_message()


def bytes_acknowledged(peer) -> int:
    """Bytes that the other end of a connection has acknowledged (tcpi_bytes_acked, linux/tcp.h)."""
    info = peer.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int.from_bytes(info[120:128], sys.byteorder)


def acknowledged(peer, least: int) -> int:
    """Return what the other end has acknowledged, once it is more than `least`: a kernel may acknowledge the last
    bytes some milliseconds after a process has read them."""
    deadline = time.monotonic() + 10
    while (number := bytes_acknowledged(peer)) <= least and time.monotonic() < deadline:
        time.sleep(0.01)
    return number


@pytest.mark.timeout(300)
def test_the_driver_sends_a_command_once_per_child_however_many_ranks_there_are(monkeypatch):
    monkeypatch.setattr(relay, "FAN_OUT", 2)
    for num_nodes, per_node in ((2, 1), (6, 4)):
        tree = Tree(num_nodes, per_node)
        channels = [tree.channel(node) for node in range(num_nodes) for _ in range(per_node)]
        tree.root.post(bytes(1 << 20))
        for channel in channels:
            assert len(channel.next_message()) == 1 << 20
        sent = [acknowledged(peer, 1 << 20) for peer in tree.root._children]
        assert len(sent) == 2 and all(1 << 20 < one < (1 << 20) + 100 for one in sent), sent
        assert not tree.root._history
        tree.root.close()


@pytest.mark.timeout(300)
def test_a_rank_that_does_not_read_delays_no_other():
    tree = Tree(1, 2)
    silent, reading = tree.channel(0), tree.channel(0)
    sent = [bytes([i]) * (1 << 20) for i in range(40)]
    for message in sent:
        tree.root.post(message)
    assert [reading.next_message() for _ in sent] == sent
    assert [silent.next_message() for _ in sent] == sent
    tree.root.close()


@pytest.mark.timeout(300)
def test_who_does_not_know_the_secret_is_refused_and_the_others_go_on(monkeypatch, caplog):
    reports: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    tree = CommandTree(LOOPBACK, 1, reports.put)
    host, port = tree.address.split(":")
    for hello in (frame(bytes(32) + CHILD), frame(b""), b"GET / HTTP/1.0\r\n\r\n" + bytes(2000)):
        with socket.create_connection((host, int(port)), timeout=200.0) as other:
            assert len(other.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
            other.sendall(hello)
            assert other.recv(100) in (b"-", b"")
    own = signing.job_secret()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(signing, "job_secret", lambda: own[::-1] if "own" in names() else own)
        with pytest.raises(SecretError, match="MEGARL_JOB_SECRET .* must be the same on all nodes"):
            threading.current_thread().name = "own"
            try:
                Channel(tree.address)
            finally:
                threading.current_thread().name = "MainThread"
    channel = Channel(tree.address)
    tree.post(b"command")
    assert channel.next_message() == b"command"
    assert reports.empty() and "not from a process of this job" in caplog.text
    tree.close()


@pytest.mark.timeout(300)
def test_who_does_not_sign_in_is_closed_and_uses_up_no_descriptor(monkeypatch):
    monkeypatch.setattr(relay, "SIGN_IN_S", 0.5)
    tree = CommandTree(LOOPBACK, 1, lambda reports: None)
    channel, (host, port) = Channel(tree.address), tree.address.split(":")
    silent = [socket.create_connection((host, int(port)), timeout=200.0) for _ in range(3)]
    for other in silent:
        assert len(other.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
        assert other.recv(1) == b""  # closed by the tree
        other.close()
    tree.post(b"command")
    assert channel.next_message() == b"command"
    tree.close()


def names() -> str:
    return threading.current_thread().name


@pytest.mark.timeout(300)
def test_a_message_is_read_only_as_what_it_was_signed_for():
    tree = CommandTree(LOOPBACK, 1, lambda reports: None)
    channel, call = Channel(tree.address), Call("actor", (0,), "update", "step 1", b"arguments")
    for index, message in enumerate((signed_command(0, call), signed_command(3, call), bytes(50))):
        tree.post(message)
        if index == 0:
            assert read_command(0, channel.next_message()) == call
            continue
        with pytest.raises(ForgedMessage, match=f"^cmd/{index} is not signed with the job's secret"):
            read_command(index, channel.next_message())
    event = signed_report(Event(3, "late", 1))
    assert read_report(event) == Event(3, "late", 1)
    for forged in (signed_command(0, Kill(1)), event[:-1] + b"\0", event[1:]):
        with pytest.raises(ForgedMessage, match="^report is not signed"):
            read_report(forged)
    tree.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ends", ["driver", "rank"])
def test_the_process_of_a_node_ends_with_the_driver_or_with_its_ranks(ends):
    """It passes on what the driver has sent before its end, and stays while one rank needs it."""
    tree = CommandTree(LOOPBACK, 1, (reports := queue.SimpleQueue()).put)
    listener, first_rank = listen(LOOPBACK), subprocess.Popen(["sleep", "100"])
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "megarl.runtime.relay_process"]
        + [str(listener.fileno()), tree.address, "2", str(first_rank.pid)],
        env=os.environ | {signing.JOB_SECRET: signing.job_secret()},
        pass_fds=[listener.fileno()],
    )
    try:
        address = f"{LOOPBACK}:{listener.getsockname()[1]}"
        listener.close()
        channels = [Channel(address) for _ in range(2)]
        tree.post(b"command")
        assert [channel.next_message() for channel in channels] == [b"command"] * 2
        if ends == "driver":
            tree.post(b"last")
            tree.close()
            assert [channel.next_message() for channel in channels] == [b"last"] * 2
        else:
            first_rank.kill()
            first_rank.wait()
            channels[0].close()
            time.sleep(2.0)  # longer than it takes to look for the rank
            channels[1].report(b"still here")
            assert [bytes(one) for one in split(reports.get(timeout=200.0))] == [b"still here"]
            channels[1].close()
        assert process.wait(200) == 0
    finally:
        process.kill()
        first_rank.kill()
        first_rank.wait()
        tree.close()
