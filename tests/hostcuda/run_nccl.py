"""Run as each rank of a world of 4: what the backend "nccl" of the emulated devices does and refuses.
Writes what it saw to report_<rank>.json for test_nccl.py.

    run_nccl.py OUT_FOLDER RANK"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SIZE = 4


def collectives(rank: int, device: str, group) -> dict[str, list[float]]:
    """Results of every collective, on CUDA over nccl or on the CPU over gloo."""
    own = torch.arange(4.0, device=device) + 10 * rank
    results = {}
    for name, op in {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}.items():
        results[name] = own.clone()
        dist.all_reduce(results[name], op, group=group)
    results["broadcast"] = own.clone()
    dist.broadcast(results["broadcast"], 2, group=group)
    parts = [torch.empty_like(own) for _ in range(SIZE)]
    dist.all_gather(parts, own, group=group)
    results["gathered"] = torch.cat(parts)
    results["gathered_into"] = own.new_empty(16)
    dist.all_gather_into_tensor(results["gathered_into"], own, group=group)
    results["scattered"] = own.new_empty(1)
    dist.reduce_scatter_tensor(results["scattered"], own, group=group)
    if device == "cuda":  # gloo has no parts of different sizes
        uneven = [own.new_empty(peer + 1) for peer in range(SIZE)]
        dist.all_gather(uneven, own.new_full((rank + 1,), rank), group=group)
        assert torch.cat(uneven).tolist() == [peer for peer in range(SIZE) for _ in range(peer + 1)]
        part = own.new_empty(rank + 1)
        dist.reduce_scatter(
            part, [own.new_full((peer + 1,), rank + peer) for peer in range(SIZE)], group=group
        )
        assert part.tolist() == [6 + SIZE * rank] * (rank + 1)
    received = own.new_empty(SIZE * (rank + 1))
    sent = torch.cat([own[:1].expand(peer + 1) for peer in range(SIZE)]).contiguous()
    dist.all_to_all_single(received, sent, [rank + 1] * SIZE, [peer + 1 for peer in range(SIZE)], group=group)
    results["exchanged"] = received
    message = torch.empty_like(own)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, own, (rank + 1) % SIZE, group),
            dist.P2POp(dist.irecv, message, (rank - 1) % SIZE, group),
        ]
    )
    for work in works:
        work.wait()
    results["batch"] = message
    if rank < 2:
        alone = torch.empty_like(own)
        dist.send(own, 1 - rank, group) if rank == 0 else dist.recv(alone, 0, group)
        dist.recv(alone, 1, group) if rank == 0 else dist.send(own, 0, group)
        results["message"] = alone
    return {name: result.tolist() for name, result in results.items()}


def error_of(function: Callable[[], object]) -> str:
    """Return the message with which a call fails, or an empty string, and how long it took."""
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def faults(rank: int) -> dict[str, str]:
    """What each planted fault is reported as."""
    here = torch.ones(2, device="cuda")
    found = {}
    of_nccl = dist.new_group(list(range(SIZE)), backend="nccl")
    found["CPU tensor"] = error_of(lambda: dist.all_reduce(torch.ones(2), group=of_nccl))

    partial = dist.new_group(list(range(SIZE)), backend="nccl")
    peer = {0: 1, 1: 0}.get(rank)
    if peer is not None:  # the first batch of a group, between two of its ranks
        batch = [
            dist.P2POp(dist.isend, here, peer, partial),
            dist.P2POp(dist.irecv, here.clone(), peer, partial),
        ]
        found["partial batch"] = error_of(lambda: dist.batch_isend_irecv(batch))
    dist.all_reduce(torch.zeros(1))  # over gloo: the others have waited for their error
    missing = dist.new_group(list(range(SIZE)), backend="nccl")
    if rank != 3:
        found["missing rank"] = error_of(lambda: dist.all_reduce(here, group=missing))

    dist.all_reduce(torch.zeros(1))
    twins = dist.new_group(list(range(SIZE)), backend="nccl")
    same = torch.ones(2, device=f"cuda:{rank // 2}")
    found["same device"] = error_of(lambda: dist.all_reduce(same, group=twins))

    used = torch.ones(2, device="cuda")
    work = dist.all_reduce(used, async_op=True)
    found["used before wait"] = error_of(lambda: used + 1)
    work.wait()
    found["used after wait"] = error_of(lambda: used + 1)
    return found


def rank_dependent_groups(rank: int) -> dict[str, str]:
    """Ranks 0 and 1 create two groups in different orders; then only rank 0 creates one. Last: nothing works
    afterwards."""
    orders = ([0, 1], [0, 1, 2]) if rank else ([0, 1, 2], [0, 1])
    groups = [dist.new_group(ranks, backend="nccl") for ranks in orders]
    found = {}
    if rank < 2:
        first = groups[0]
        found["order"] = error_of(lambda: dist.all_reduce(torch.ones(2, device="cuda"), group=first))
    if rank == 0:
        alone = dist.new_group([0, 1], backend="nccl")
        found["alone"] = error_of(lambda: dist.all_reduce(torch.ones(2, device="cuda"), group=alone))
    return found


def main(out: Path, rank: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{out}/world",
        world_size=SIZE,
        rank=rank,
        timeout=timedelta(seconds=60),
    )
    report = {
        "backend": dist.get_backend(dist.new_group(list(range(SIZE)), backend="nccl")),
        "cuda": collectives(rank, "cuda", None),
        "cpu": collectives(rank, "cpu", None),
    }
    mean = torch.tensor([float(rank)], device="cuda")
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    report["mean"] = mean.tolist()
    os.environ["HOSTNCCL_TIMEOUT_S"] = "2"
    report["faults"] = faults(rank)
    dist.monitored_barrier(dist.new_group(list(range(SIZE)), backend="gloo"))
    report["groups"] = rank_dependent_groups(rank)
    (out / f"report_{rank}.json").write_text(json.dumps(report))
    time.sleep(3)  # the store of the world is rank 0's
    os._exit(0)  # groups are in disorder


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
