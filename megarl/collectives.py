"""Gather typed messages from the ranks of a process group, without pickle."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from megarl.messages import decode, encode

T = TypeVar("T")


def all_gather_messages(value: T, kind: type[T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of the group (None: the world), in the order of the ranks.

    Collective. torch's own `all_gather_object` sends pickles, which run code when they are read.

    Args:
        kind: the declared type of the values, see megarl/messages.py."""
    device = dist.distributed_c10d._get_object_coll_device(group)  # the CPU, if the group supports it
    data = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8).to(device)
    size = torch.tensor([len(data)], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group=group)
    return [
        decode(memoryview(part[:length].cpu().numpy()), kind)
        for part, length in zip(gathered, lengths, strict=True)
    ]
