"""How a rank joins the world: what is waited for, how long, and what a GPU needs that a CPU does not.

There is no GPU here: its device is written down where it is asked for, and the world is one rank on gloo.

    pytest tests/workers/test_join_world.py"""

from __future__ import annotations

import ast
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megarl
from megarl.config.mesh import MeshSpec, group_timeout
from megarl.megatron import mesh as megatron_mesh
from megarl.workers import worker


@pytest.fixture
def alone(monkeypatch):
    """The variables of the only rank of a world that is left afterwards."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker, "world_store", lambda timeout_s: dist.HashStore())
    monkeypatch.setattr(megatron_mesh, "_groups", {})
    monkeypatch.setattr(megatron_mesh, "_second_channels", {})
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one GPU, as far as joining asks. Returns what was asked for, in order."""
    asked: list[object] = []
    zeros, init, reduce = torch.zeros, dist.init_process_group, dist.all_reduce

    def zeros_anywhere(*size, device=None, **options):
        if str(device).startswith("cuda"):
            asked.append(("zeros", device))
            device = None
        return zeros(*size, device=device, **options)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.append(("current", device)))
    monkeypatch.setattr(torch, "zeros", zeros_anywhere)
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda backend, **options: asked.append(("init", backend)) or init("gloo", **options),
    )
    monkeypatch.setattr(
        dist,
        "all_reduce",
        lambda tensor, group=None: asked.append(("all_reduce", group)) or reduce(tensor, group=group),
    )
    return asked


def test_a_gpu_makes_the_worlds_communicator_while_all_ranks_are_there(alone, gpu):
    """Of batch_isend_irecv, torch/distributed/distributed_c10d.py says: "if this API is the first collective
    call in the group, all ranks of the group must participate". Transfers between a mesh's ranks are batches
    on the world."""
    worker.join_world(30)
    device = torch.device("cuda", 0)
    assert gpu == [("current", 0), ("init", "cpu:gloo,cuda:nccl"), ("zeros", device), ("all_reduce", None)]


def test_more_ranks_than_gpus_is_said_before_cuda_says_invalid_device_ordinal(alone, gpu, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(
        RuntimeError,
        match=f"^every rank needs a GPU .*{socket.gethostname()} has 1 for 2 ranks. Try --nproc-per-node 1.$",
    ):
        worker.join_world(30)
    assert gpu == []


def test_groups_wait_as_long_as_the_world_does(alone):
    """Longer than a call may take: PyTorch's own limit of 30 minutes, or 10 on NCCL, may be shorter."""
    worker.join_world(7200)
    spec = MeshSpec((0,))
    megatron_mesh.create_groups(spec, group_timeout(7200))
    groups = {
        dist.group.WORLD,
        *(group for group in vars(megatron_mesh.groups_of(spec)).values() if group is not None),
    }
    assert len(groups) > 1
    assert {group._get_backend(torch.device("cpu")).options._timeout for group in groups} == {
        timedelta(seconds=7260)
    }


def test_no_group_is_made_without_a_timeout():
    """PyTorch's default would hold, whatever --call-timeout-s says."""
    seen = 0
    for path in Path(megarl.__file__).parent.rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if name in ("new_group", "init_process_group", "create_groups"):
                seen += 1
                has_timeout = (
                    "timeout" in {keyword.arg for keyword in call.keywords}
                    or name == "create_groups"
                    and len(call.args) == 2
                )
                assert has_timeout, f"{path}:{call.lineno}"
    assert seen >= 8
