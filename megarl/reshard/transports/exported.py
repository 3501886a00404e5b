"""Describe tensors so that another process can open them.

The description has the storages that hold the tensors, and each tensor's place in its storage. A source sends
the description to its destinations once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.reshard.transports import cuda_ipc, shared_memory


@dataclass(frozen=True, slots=True)
class Placed:
    """A [rows, cols] tensor within a storage."""

    segment: int
    offset: int
    """Offset in the storage, in bytes."""
    rows: int
    cols: int
    row_stride: int
    """Stride of a row, in elements."""
    dtype: str
    """Name of the dtype, as in torch.<dtype>."""


@dataclass(frozen=True)
class Exported:
    """Tensors of one process, as a message. After a move of any tensor the message compares unequal."""

    segments: tuple[shared_memory.SharedMemory | cuda_ipc.CudaMemory, ...]
    tensors: dict[str, Placed]


def export(tensors: dict[str, Tensor]) -> Exported:
    """Share the storages of these [rows, cols] tensors, and return the message by which another process opens
    them.

    CPU storages move, so build no CopyPlan before. Megatron's parameters lie in a few contiguous buffers, so
    the number of storages is small for any number of tensors."""
    number_of: dict[int, int] = {}
    segments, placed = [], {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage._cdata not in number_of:
            number_of[storage._cdata] = len(segments)
            segments.append((cuda_ipc if tensor.is_cuda else shared_memory).share(storage))
        rows, cols = tensor.shape
        placed[name] = Placed(
            number_of[storage._cdata],
            tensor.storage_offset() * tensor.element_size(),
            rows,
            cols,
            tensor.stride(0),
            str(tensor.dtype).removeprefix("torch."),
        )
    return Exported(tuple(segments), placed)


def open_exported(exported: Exported) -> dict[str, Tensor]:
    """Return the tensors by name, as views of the other process's memory.

    The views may only be read, and only during a sync."""
    opened = [
        (cuda_ipc if isinstance(s, cuda_ipc.CudaMemory) else shared_memory).open_shared(s)
        for s in exported.segments
    ]
    return {name: _view(opened[p.segment], p) for name, p in exported.tensors.items()}


def _view(segment: Tensor, placed: Placed) -> Tensor:
    dtype = getattr(torch, placed.dtype)
    span = (
        ((placed.rows - 1) * placed.row_stride + placed.cols) * dtype.itemsize
        if placed.rows and placed.cols
        else 0
    )
    flat = segment[placed.offset : placed.offset + span].view(dtype)
    return flat.as_strided((placed.rows, placed.cols), (placed.row_stride, 1))
