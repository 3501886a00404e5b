"""Messages of a weight sync through a c10d store: typed, signed, with a deadline, and removed.

pytest tests/reshard/test_key_value_store.py"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from megarl.messages import MessageError
from megarl.reshard.destination import Arrival
from megarl.reshard.key_value_store import KeyValueStore, Late
from megarl.runtime.signing import ForgedMessage


@pytest.fixture
def store():
    """The store that a world of one process meets at."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()


SERVER = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(300)
"""


@pytest.fixture
def server():
    """The process that holds the store, as a driver does, with a world of one process that meets there."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        store = dist.TCPStore("127.0.0.1", int(process.stdout.readline()), timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield process
    finally:
        os.kill(process.pid, signal.SIGCONT)
        if dist.is_initialized():
            dist.destroy_process_group()
        process.kill()
        process.wait()


def soon() -> float:
    return time.monotonic() + 0.05


def test_another_rank_reads_what_was_written(store):
    writer, reader = KeyValueStore("3"), KeyValueStore("3")
    arrival = Arrival(2, [17, 2**64 - 1])
    writer.write("1/0>1", arrival)
    assert reader.read("1/0>1", Arrival, soon()) == arrival
    with pytest.raises(MessageError, match="Arrival"):
        writer.write("1/0>2", "text")
        reader.read("1/0>2", Arrival, soon())
    with pytest.raises(Late, match="nobody wrote 1/2>1"):
        reader.read("1/2>1", Arrival, soon())
    with pytest.raises(Late):
        KeyValueStore("4").read("1/0>1", Arrival, soon())


@pytest.mark.parametrize("how", ["changed", "cut", "of another key", "of another generation"])
def test_what_this_job_did_not_write_there_is_not_read(store, how):
    writer, reader = KeyValueStore("0"), KeyValueStore("0")
    writer.write("vote/1", None)
    writer.write("vote/2", "it hangs")
    other = KeyValueStore("1")
    other.write("vote/2", "it hangs")
    key = "megarl_weights/0/vote/2"
    data = store.get(key)
    forged = {
        "changed": data[:-1] + b"x",
        "cut": data[:20],
        "of another key": store.get("megarl_weights/0/vote/1"),
        "of another generation": store.get("megarl_weights/1/vote/2"),
    }
    store.set(key, forged[how])
    with pytest.raises(ForgedMessage, match="vote/2 is not signed"):
        reader.read("vote/2", str | None, soon())


def test_messages_are_removed_two_syncs_later(store):
    writer = KeyValueStore("0")
    before = store.num_keys()
    writer.write("0", None)
    for round in range(1, 9):
        writer.end_sync()
        writer.write(str(round), None)
        assert writer.read(str(max(round - 2, 0)), None, soon()) is None
        assert store.num_keys() - before <= 4


def test_the_time_in_which_the_driver_is_stopped_does_not_count(server):
    """A rank that is not late writes soon after the driver goes on; one that never writes is late even so."""
    writer, reader = KeyValueStore("0"), KeyValueStore("0")
    writer._store = writer._store.clone()  # a connection of its own: the reader's is busy while it waits
    os.kill(server.pid, signal.SIGSTOP)
    paused_s, deadline_s = 6.0, 1.5
    resume = threading.Timer(paused_s, os.kill, (server.pid, signal.SIGCONT))
    write = threading.Timer(paused_s + deadline_s / 2, writer.write, ("vote/1", "a problem"))
    resume.start(), write.start()
    assert reader.read("vote/1", str | None, time.monotonic() + deadline_s) == "a problem"
    write.join()
    with pytest.raises(Late, match="nobody wrote vote/2"):
        reader.read("vote/2", str | None, soon())
