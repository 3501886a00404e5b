"""Exported weights as another process sees them, and which pair of processes takes which transport.

pytest tests/reshard/test_transports.py"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import msgspec
import pytest
import torch

from megarl.messages import decode, encode
from megarl.reshard.transports import cuda_ipc, shared_memory
from megarl.reshard.transports.choose import Place, choose, place_here
from megarl.reshard.transports.exported import export, open_exported

READER = """
import sys
from megarl.messages import decode, encode
from megarl.reshard.transports.exported import Exported, open_exported
tensors = open_exported(decode(sys.stdin.buffer.read(), Exported))
sys.stdout.buffer.write(encode({name: tensor.tolist() for name, tensor in tensors.items()}))
"""


def read_elsewhere(exported) -> dict[str, list]:
    """What another process reads."""
    done = subprocess.run(
        [sys.executable, "-c", READER],
        input=encode(exported),
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    return decode(done.stdout, dict[str, list])


def shared_memory_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("torch_")}


def test_another_process_reads_what_is_there_now():
    """Views of one buffer, with strides and offsets, and of a storage of another dtype; written before and
    after the export."""
    buffer, half = torch.arange(40.0), torch.arange(6, dtype=torch.bfloat16).view(6, 1)
    tensors = {
        "all": buffer.view(8, 5),
        "columns": buffer.view(8, 5)[2:7, 1:3],
        "vector": buffer[3:7].view(4, 1),
        "half": half,
    }
    alias, before = buffer.view(5, 8), shared_memory_files()
    exported = export(tensors)
    assert len(exported.segments) == 2
    assert shared_memory_files() == before  # nothing has a name
    alias[2, 3] = -1.0  # a view that was made before, as an optimizer's
    half[1] = 7.0
    assert read_elsewhere(exported) == {name: tensor.tolist() for name, tensor in tensors.items()}
    assert export(tensors) == exported  # where it is does not change
    opened = open_exported(exported)
    buffer[0] = 5.0
    assert opened["all"][0, 0] == 5.0


def test_tensors_that_moved_are_exported_anew():
    tensors = {"weight": torch.ones(4, 4)}
    first = export(tensors)
    tensors["weight"] = torch.zeros(4, 4)  # as after an offload
    assert export(tensors) != first


def test_what_cannot_be_shared_or_opened_says_why(monkeypatch):
    full = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(
        OSError, match=r"64 bytes .* /dev/shm has 0 left\. .*--shm-size.*--reshard-transport messages"
    ):
        export({"weight": torch.ones(4, 4)})
    monkeypatch.undo()
    segment = shared_memory.share(torch.ones(4).untyped_storage())
    for gone in (
        msgspec.structs.replace(segment, started=segment.started + 1),
        msgspec.structs.replace(segment, pid=2**22 + 1),
    ):
        with pytest.raises(ProcessLookupError, match="has ended"):
            shared_memory.open_shared(gone)


HERE, THERE = Place("node", 0, "11", "cpu"), Place("node", 1, "12", "cpu")
ENGINE = dataclasses.replace(HERE, process="engine of rank 0")
FAR = dataclasses.replace(THERE, node="other")


def on_gpu(place: Place) -> Place:
    return dataclasses.replace(place, device="cuda")


@pytest.mark.parametrize(
    "source, destination, expected",
    [
        (HERE, HERE, "direct"),
        (HERE, THERE, "shared-memory"),
        (HERE, ENGINE, "shared-memory"),
        (HERE, FAR, "messages"),
        (on_gpu(HERE), on_gpu(HERE), "direct"),
        (on_gpu(HERE), on_gpu(THERE), "cuda-ipc"),
        (on_gpu(HERE), on_gpu(FAR), "messages"),
        (HERE, on_gpu(THERE), "messages"),
        (on_gpu(HERE), THERE, "messages"),
    ],
)
def test_choice(source, destination, expected):
    assert choose(source, destination)[0] == expected


def test_a_forced_transport_is_taken_or_refused_with_one_that_works():
    assert choose(HERE, THERE, "messages") == ("messages", "--reshard-transport")
    assert choose(HERE, HERE, "messages")[0] == "direct"  # it is about pairs of processes
    for source, destination, wanted, why, works in [
        (HERE, FAR, "shared-memory", "different nodes", "messages"),
        (HERE, THERE, "direct", "two processes", "shared-memory, messages"),
        (HERE, THERE, "cuda-ipc", "rank 0 has its weights in cpu memory", "shared-memory, messages"),
        (HERE, ENGINE, "messages", "no messages to itself", "shared-memory"),
    ]:
        with pytest.raises(
            ValueError, match=rf"--reshard-transport \({wanted}\).*{why}.* works: {works}\. Try auto"
        ):
            choose(source, destination, wanted)


def test_this_process_is_where_it_is():
    assert choose(place_here(0, "cpu"), place_here(3, "cpu"))[0] == "direct"
    assert choose(place_here(0, "cpu"), place_here(0, "cpu", "engine of rank 0"))[0] == "shared-memory"


@pytest.mark.parametrize("owner", [0, 1])
def test_a_gpus_memory_is_opened_on_the_device_that_reads_it(monkeypatch, owner):
    """Stand-ins for CUDA, which is not here: the device that a handle is opened on decides whose kernels can
    read it. torch/csrc/StorageSharing.cpp, THPStorage_newSharedCuda: `device_guard(device)`."""
    opened = []

    def new_shared(device, *handle):
        opened.append((device, handle))
        return torch.arange(6, dtype=torch.uint8).untyped_storage()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda_ipc, "device_uuid", lambda device: f"GPU-{device}")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, other: (here, other) == (1, 0))
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(new_shared))
    tensor = cuda_ipc.open_shared(cuda_ipc.CudaMemory(f"GPU-{owner}", (b"handle", 6), 6))
    assert opened == [(1, (b"handle", 6))] and tensor.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_gpu_that_cannot_be_read_is_said_before_anything_is_opened(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(cuda_ipc, "device_index", lambda uuid: 0)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, other: False)
    with pytest.raises(RuntimeError, match="^GPU 1 cannot read GPU 0 .* Use --reshard-transport messages.$"):
        cuda_ipc.open_shared(cuda_ipc.CudaMemory("GPU-0", (), 6))
