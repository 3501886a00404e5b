"""Rectangles for every path of a copy kernel: used on a CPU that emulates it and on a GPU."""

from __future__ import annotations

import random

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PAIRS = [(dtype, dtype) for dtype in (torch.int8, torch.int16, torch.float32, torch.int64)]
PAIRS += [(src, dst) for src in FLOATS for dst in FLOATS if src != dst]
INTEGER_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 64, 100, 257, 1024)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(INTEGER_OF[tensor.element_size()])


def matrix(rows: int, cols: int, dtype: torch.dtype, seed: int) -> Tensor:
    return (torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)


def rectangles(
    src_dtype: torch.dtype, dst_dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """(destination, what it must become, destination views, source views).

    Both leading dimensions odd, both multiples of 16 bytes, and one of each, so that rows are misaligned
    alike, by a constant or differently; widths around every vector size at random offsets; one rectangle of
    many tiles, in one row and in many."""
    rng = random.Random(0)
    expected = torch.zeros(3_000_000, dtype=dst_dtype)
    dst = expected.to(device, copy=True)
    views, sources, at = [], [], 0

    def add(values: Tensor, on_device: Tensor, start: int, ld: int) -> None:
        expected.as_strided(values.shape, (ld, 1), start).copy_(values)
        views.append(dst.as_strided(values.shape, (ld, 1), start))
        sources.append(on_device)

    for src_ld, dst_ld in ((1211, 1213), (1216, 1232), (1211, 1216), (1216, 1213), (1216, 1216)):
        src = matrix(64, src_ld, src_dtype, seed=src_ld)
        on_device = src.to(device)
        for width in (*WIDTHS, src_ld):
            rows = rng.choice((1, 2, 5, 16, 40))
            row, col, start = (
                rng.randint(0, 64 - rows),
                rng.randint(0, src_ld - width),
                at + rng.randint(0, 20),
            )
            part = slice(row, row + rows), slice(col, col + width)
            add(src[part], on_device[part], start, max(dst_ld, width))
            at = start + rows * max(dst_ld, width)
    for src in (matrix(1, 300_003, src_dtype, 1), matrix(3001, 97, src_dtype, 2)):
        add(src, src.to(device), at + 5, src.shape[1])
        at += 5 + src.numel()
    return dst, expected, views, sources
