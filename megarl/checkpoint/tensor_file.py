"""Write and read safetensors files in pieces, so that no process holds more than the rows that are being
moved.

The library `safetensors` writes only what is in memory as a whole, and reads through a memory map. Headers
are read by megarl/files/tensor_header.py, which describes the format."""

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
from megarl.files.tensor_header import TensorFileError, read_header
from megarl.files.writing import writing

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


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write. `blocks` gives its rows from the first to the last, in tensors of any number of
    rows."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[Tensor]]

    @property
    def num_bytes(self) -> int:
        rows, cols = matrix_size(self.shape)
        return rows * cols * self.dtype.itemsize


def write_tensors(path: Path, entries: Sequence[Entry]) -> tuple[int, str]:
    """Write a file and wait until it is on the disk. Returns: its size in bytes and its SHA-256. Raises:
    WriteError."""
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
    with writing(path), open(path, "wb", buffering=0) as file:

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
    """Return the memory of a contiguous CPU tensor as bytes."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


class TensorFile:
    """A safetensors file to read from. Every tensor is a matrix here: [n] is [n, 1], [a, b, c] is [a, b * c].

    Raises: TensorFileError for a file that is cut short or not safetensors."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self._data, header = read_header(self.path)
        if unknown := [(key, entry.dtype) for key, entry in header.items() if entry.dtype not in DTYPES]:
            raise TensorFileError(
                f"{self.path}: {unknown[0][0]} is of {unknown[0][1]}, which is not supported"
            )
        self._entries = {
            key: (DTYPES[entry.dtype], entry.shape, entry.start) for key, entry in header.items()
        }

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def keys(self) -> Iterable[str]:
        return self._entries.keys()

    def dtype(self, key: str) -> torch.dtype:
        return self._entries[key][0]

    def shape(self, key: str) -> tuple[int, ...]:
        return self._entries[key][1]

    def read(self, key: str, row_start: int = 0, row_end: int | None = None) -> Tensor:
        """Return a copy of rows of a tensor, [row_end - row_start, cols]."""
        if key not in self._entries:
            raise TensorFileError(f"{self.path} has no {key}")
        dtype, shape, start = self._entries[key]
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
