"""Synchronisation that megarl would lack is found on the emulated device: each fault is planted, and seen.

make test-hostcuda ARGS=tests/hostcuda/test_planted.py"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.megatron import offload
from megarl.megatron.offload import ModelMemory
from tests.launch import run

DEVICE = torch.device("cuda", 0)
nothing = lambda *arguments, **options: None


def offload_and_load() -> torch.Tensor:
    """Return the weights after a way out and back, while another tensor has had their memory."""
    linear = torch.nn.Linear(64, 64, device=DEVICE)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(4096.0).view(64, 64))
        memory = ModelMemory(SimpleNamespace(chunks=[linear], device=DEVICE), "test")
        linear.weight.add_(1)
        memory.offload(["parameters"])
        torch.full((64, 64), 7.0, device=DEVICE)
        memory.load(["parameters"])
        memory.use("parameters")
        return linear.weight * 1


def test_offload_keeps_the_weights():
    assert torch.equal(offload_and_load().cpu(), torch.arange(1.0, 4097.0).view(64, 64))


@pytest.mark.parametrize(
    "owner, name, race",
    [
        (offload._Copies, "await_arrival", "aten::mul.* reads memory that aten::copy_ .* wrote"),
        (torch.Tensor, "record_stream", "the allocation of a tensor .* memory that aten::copy_ .* read"),
        (torch.cuda.Stream, "wait_stream", "aten::copy_ .* reads memory that aten::add.* wrote"),
    ],
    ids=["nobody waits for what is loaded", "memory is not recorded", "the copy does not wait"],
)
def test_offload_without_a_synchronisation_is_a_race(monkeypatch, owner, name, race):
    monkeypatch.setattr(owner, name, nothing)
    with pytest.raises(RuntimeError, match=f"race: {race}"):
        offload_and_load()
    torch.cuda.synchronize()


def test_loading_before_the_host_has_the_weights_gives_nan(monkeypatch, no_race_reports):
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", nothing)
    before = offload_and_load()
    assert before.isnan().any()
    torch.cuda.synchronize()


JOIN = """
import sys
import torch
import torch.distributed as dist
from megarl.workers.worker import join_world
all_reduce = dist.all_reduce
if sys.argv[1] == "without":
    dist.all_reduce = lambda *arguments, **options: None
join_world(60)
dist.all_reduce = all_reduce
rank = dist.get_rank()
if rank < 2:
    own, other = torch.full((2,), float(rank), device="cuda"), torch.empty(2, device="cuda")
    peer = 1 - rank
    batch = [dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, other, peer)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert other.tolist() == [peer, peer]
dist.all_reduce(torch.zeros(1))  # over gloo: rank 2 waits for the others
"""


@pytest.mark.parametrize("fault", ["with", "without"])
def test_the_first_batch_of_the_world_may_be_of_two_ranks(tmp_path, fault):
    """The weights of one mesh travel so. Without a first operation of the whole world NCCL would hang."""
    (tmp_path / "join.py").write_text(JOIN)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 3)
    done = run(
        *launcher,
        tmp_path / "join.py",
        fault,
        timeout=200,
        folder=Path(tmp_path),
        preloaded=True,
        environment={"HOSTNCCL_TIMEOUT_S": "15"},
    )
    if fault == "with":
        assert done.returncode == 0, done.stderr[-3000:]
    else:
        assert done.returncode and "ranks [2] have not taken part in 15 s" in done.stderr
