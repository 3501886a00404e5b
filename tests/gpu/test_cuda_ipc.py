"""Weights on a GPU as another process reads them through an IPC handle.

pytest tests/gpu/test_cuda_ipc.py"""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest
import torch

from megarl.messages import decode, encode
from megarl.reshard.transports.exported import export

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

READER = """
import sys, torch
from multiprocessing.connection import Connection
from megarl.messages import decode, encode
from megarl.reshard.transports.exported import Exported, open_exported
requests, replies = Connection(0, writable=False), Connection(1, readable=False)
torch.cuda.set_device(int(sys.argv[1]))
for _ in range(2):
    tensors = open_exported(decode(requests.recv_bytes(), Exported))
    assert {tensor.device.index for tensor in tensors.values()} == {torch.cuda.current_device()}
    got = {name: (tensor * 1).cpu().tolist() for name, tensor in tensors.items()}
    torch.cuda.synchronize()
    replies.send_bytes(encode(got))
"""


two_gpus = [
    pytest.mark.two_gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("reading_gpu", [0, pytest.param(1, marks=two_gpus)])
def test_another_process_reads_what_is_there_now_and_after_a_move(reading_gpu):
    """Views of one buffer within the caching allocator's block, with strides and offsets; then other memory,
    as after an offload. On the same GPU, and on another one, whose kernels read it as their own device's."""
    filler, buffer = torch.zeros(100, device="cuda"), torch.arange(40.0, device="cuda")
    assert filler.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
    command = [sys.executable, "-c", READER, str(reading_gpu)]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    requests = Connection(os.dup(reader.stdin.fileno()), readable=False)
    replies = Connection(os.dup(reader.stdout.fileno()), writable=False)
    try:
        for _ in range(2):
            tensors = {
                "all": buffer.view(8, 5),
                "columns": buffer.view(8, 5)[2:7, 1:3],
                "half": torch.ones(6, 1, device="cuda").bfloat16(),
            }
            exported = export(tensors)
            assert len(exported.segments) == 2
            buffer[3] = -1.0  # written after the export
            torch.cuda.synchronize()
            requests.send_bytes(encode(exported))
            read = decode(replies.recv_bytes(), dict[str, list])
            assert read == {name: tensor.tolist() for name, tensor in tensors.items()}
            buffer = torch.full((40,), 7.0, device="cuda")
        assert reader.wait(timeout=30) == 0
    finally:
        reader.kill()
