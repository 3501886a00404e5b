"""Read headers of safetensors files: dtype and shape of every tensor, without elements and without torch.

The format: 8 bytes with the length of the header, little endian; the header, JSON, key -> {dtype, shape,
data_offsets}; the elements."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

ITEMSIZE = {
    dtype: size
    for size, dtypes in {
        8: "F64 I64 U64",
        4: "F32 I32 U32",
        2: "F16 BF16 I16 U16",
        1: "F8_E4M3 F8_E5M2 F8_E8M0 I8 U8 BOOL",
    }.items()
    for dtype in dtypes.split()
}
"""Maps each dtype to the bytes of an element."""
MAX_HEADER_BYTES = 100 << 20
"""Size limit of a header, the same as in the safetensors library."""
_LFS_POINTER = b"version https://git-lfs"


class TensorFileError(ValueError):
    """Error of a safetensors file that cannot be used. The text names the file and the tensor, if any."""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a file. Its elements are the bytes from `start` to `end`, counted from the end of the
    header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: str | os.PathLike) -> tuple[int, dict[str, HeaderEntry]]:
    """Return where the elements of a file begin, and its tensors by name, after comparing them with the
    file's size.

    Returns: the offset of the first element, and the tensors by name.
    Raises: TensorFileError for a file that is missing, cut short or not safetensors."""
    path = Path(path)
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(len(_LFS_POINTER))
            length = int.from_bytes(start[:8], "little")
            if start == _LFS_POINTER:
                raise TensorFileError(
                    f"{path} is a pointer of Git LFS, not the file itself. Run git lfs pull in its repository"
                )
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise TensorFileError(
                    f"{path} is cut short or not a safetensors file: {size} bytes, and a header of {length}"
                )
            file.seek(8)
            text = file.read(length)
    except OSError as error:
        raise TensorFileError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        entries = {key: _entry(item) for key, item in json.loads(text).items() if key != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TensorFileError(f"{path} has no safetensors header: {type(error).__name__}: {error}") from error
    elements = 8 + length
    for key, entry in entries.items():
        if (
            entry.end - entry.start != math.prod(entry.shape) * ITEMSIZE[entry.dtype]
            or elements + entry.end > size
        ):
            raise TensorFileError(
                f"{path} is cut short or damaged: {key} should be bytes {entry.start} to "
                f"{entry.end} of {size - elements}"
            )
    return elements, entries


def _entry(item: dict[str, object]) -> HeaderEntry:
    """Return the dtype, shape and byte range of a tensor, from its item in a header.

    Raises: KeyError, TypeError or ValueError if it does not describe a tensor."""
    shape, (start, end) = tuple(item["shape"]), item["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError(f"shape {list(shape)} and offsets {start} and {end} must be whole numbers from 0 on")
    if item["dtype"] not in ITEMSIZE:
        raise ValueError(f"dtype {item['dtype']} is not known")
    return HeaderEntry(item["dtype"], shape, start, end)
