"""Safetensors files, written and read in pieces: nobody holds more than the rows that are just moving.

The library `safetensors` writes only what is in memory as a whole, and reads through a memory map. The format: 8 bytes with the length of the
header, little endian; the header, JSON, key -> {dtype, shape, data_offsets}; the elements, in order, without gaps."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megarl.checkpoint.rectangles import matrix_size

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100 << 20
"""As in the library."""


class TensorFileError(ValueError):
    """A file that is not what its header, or its reader, says."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write. `blocks` gives its rows from the first to the last, in tensors of any number of rows."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[Tensor]]

    @property
    def num_bytes(self) -> int:
        rows, cols = matrix_size(self.shape)
        return rows * cols * self.dtype.itemsize


def write_tensors(path: Path, entries: Sequence[Entry]) -> tuple[int, str]:
    """Write a file and wait until it is on the disk. Returns: its size in bytes and its SHA-256."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for entry in entries:
        header[entry.key] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.num_bytes],
        }
        at += entry.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that elements are aligned
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:

        def put(data) -> None:
            digest.update(data)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]

        put(len(text).to_bytes(8, "little"))
        put(text)
        for entry in entries:
            start = file.tell()
            for block in entry.blocks():
                put(as_bytes(block.detach().to("cpu", entry.dtype).contiguous()))
            if file.tell() - start != entry.num_bytes:
                raise TensorFileError(
                    f"{entry.key}: {file.tell() - start} bytes came for a tensor of {entry.num_bytes}"
                )
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


class TensorFile:
    """A safetensors file to read from. Every tensor is a matrix here: [n] is [n, 1], [a, b, c] is [a, b * c].

    Raises: TensorFileError for a file that is cut short or not safetensors."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        size = self.path.stat().st_size
        with open(self.path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise TensorFileError(
                    f"{self.path} is cut short or not a safetensors file: {size} bytes, and a header of {length}"
                )
            try:
                header = json.loads(file.read(length))
                self._entries = {key: _place(item) for key, item in header.items() if key != "__metadata__"}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise TensorFileError(
                    f"{self.path} has no safetensors header: {type(error).__name__}: {error}"
                ) from error
        self._data = 8 + length
        for key, (dtype, shape, start, end) in self._entries.items():
            rows, cols = matrix_size(shape or (1,))
            if end - start != rows * cols * dtype.itemsize or self._data + end > size:
                raise TensorFileError(
                    f"{self.path} is cut short or damaged: {key} should be bytes {start} to {end} of {size - self._data}"
                )

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def keys(self) -> Iterable[str]:
        return self._entries.keys()

    def dtype(self, key: str) -> torch.dtype:
        return self._entries[key][0]

    def shape(self, key: str) -> tuple[int, ...]:
        return self._entries[key][1]

    def read(self, key: str, row_start: int = 0, row_end: int | None = None) -> Tensor:
        """[row_end - row_start, cols], a copy."""
        if key not in self._entries:
            raise TensorFileError(f"{self.path} has no {key}")
        dtype, shape, start, _ = self._entries[key]
        rows, cols = matrix_size(shape or (1,))
        row_end = rows if row_end is None else row_end
        if not 0 <= row_start <= row_end <= rows:
            raise TensorFileError(f"{self.path}: {key} has {rows} rows, not rows {row_start} to {row_end}")
        out = torch.empty(row_end - row_start, cols, dtype=dtype)
        view, num_bytes = as_bytes(out), cols * dtype.itemsize
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self._data + start + row_start * num_bytes)
            while view:
                count = file.readinto(view)
                if not count:
                    raise TensorFileError(f"{self.path} ends within {key}")
                view = view[count:]
        return out


def _place(item: dict[str, object]) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """(dtype, shape, start, end) of what a header says of a tensor. Raises: KeyError, TypeError or ValueError if it says something else."""
    shape, (start, end) = tuple(item["shape"]), item["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError(f"shape {list(shape)} and offsets {start} and {end} must be whole numbers from 0 on")
    return DTYPES[item["dtype"]], shape, start, end
