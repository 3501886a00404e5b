"""Rectangles of Hugging Face tensors, and the rectangles that a range of a local parameter's memory holds.

The canonical matrices are the atlas' (`megarl/reshard/atlas.py`): the tensors of the Hugging Face folder,
[rows, cols], a vector [n, 1]."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from megarl.reshard.atlas import Box, LocalParam


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle of a Hugging Face tensor, with its values in memory.

    Args:
        kind: what of the tensor: weights, exp_avg, ...
        shape: of the whole tensor, as in Hugging Face's files: [n] or [rows, cols].
        values: [rows, cols] of the box; a view of live memory, or a copy of it."""

    kind: str
    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor


def matrix_size(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, cols) of a tensor of this shape; the dimensions after the first are folded into
    columns."""
    rows, cols = shape[0], 1
    for size in shape[1:]:
        cols *= size
    return rows, cols


def whole(shape: Sequence[int]) -> Box:
    rows, cols = matrix_size(shape)
    return Box(0, rows, 0, cols)


def rectangles_of(
    kind: str, param: LocalParam, sizes: dict[str, tuple[int, int]], flat: Tensor, start: int = 0
) -> Iterator[Rectangle]:
    """Yield the rectangles of Hugging Face tensors that the elements [start, start + len(flat)) of a local
    parameter hold, at most three of each piece: the end of a row, complete rows, the start of a row. Padding
    is left out.

    Args:
        sizes: of the canonical tensors.
        flat: [n], contiguous."""
    cols = param.cols
    for piece in param.pieces:
        if piece.local_col or piece.cols != cols:
            raise ValueError(f"{piece.hf_name}: stored beside other columns, which is not contiguous memory")
        at = max(start, piece.local_row * cols)
        end = min(start + flat.numel(), (piece.local_row + piece.rows) * cols)
        rows, width = sizes[piece.hf_name]
        while at < end:
            row, col = divmod(at, cols)
            count = min(end - at, cols - col) if col or end - at < cols else (end - at) // cols * cols
            values = flat[at - start : at - start + count].view(-1, min(count, cols))
            row, col = piece.row_start + row - piece.local_row, piece.col_start + col
            yield Rectangle(
                kind,
                piece.hf_name,
                (rows,) if width == 1 else (rows, width),
                Box(row, row + values.shape[0], col, col + values.shape[1]),
                values,
            )
            at += count


def tiling_problem(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """Return why the boxes do not cover a tensor of this shape, each element once; None if they do."""
    boxes, full = sorted(boxes), whole(shape)
    reach: list[Box] = []
    for box in boxes:
        if box != box.overlap(full):
            return f"{tuple(box)} is outside of {list(shape)}"
        reach = [other for other in reach if other.row_end > box.row_start]
        if any(box.overlap(other) for other in reach):
            return f"{tuple(box)} is there twice"
        reach.append(box)
    missing = full.area - sum(box.area for box in boxes)
    return f"{missing} of {full.area} elements are missing" if missing else None
