"""Read rows of *.jsonl, *.json and *.parquet files as dictionaries, each with its place in the file.

The first two may be compressed (*.gz, *.zst), and may hold one array in place of a row per line."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.config.rules_files import is_data_file

if TYPE_CHECKING:
    import pyarrow


class UnreadableFile(ValueError):
    """Error of a data file that cannot be used at all; the message names the file and the requirement."""


@dataclass(frozen=True, slots=True)
class UnreadableRow:
    """Takes the place of a row that could not be parsed, and holds the reason."""

    reason: str


def read_rows(path: str) -> Iterator[tuple[str, object]]:
    """Yield (where, row): the place and the parsed value of each row of a *.jsonl or *.parquet file.

    `where` is "file:line" or "file row n". `row` is the parsed value or an `UnreadableRow`.

    Raises: UnreadableFile for a missing file, an unknown ending, a damaged parquet file, or a file without
    rows.
    """
    if not os.path.exists(path):
        raise UnreadableFile(f"{path} does not exist. Give the path of a *.jsonl or *.parquet file.")
    if not is_data_file(path):
        raise UnreadableFile(f"{path} is not a *.jsonl or *.parquet file.")
    reader = _read_parquet if path.lower().endswith(".parquet") else _read_json
    num_rows = 0
    try:
        for num_rows, item in enumerate(reader(path), start=1):
            yield item
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error}.") from error
    if num_rows == 0:
        raise UnreadableFile(f"{path} is empty: wanted at least one row.")


def _read_json(path: str) -> Iterator[tuple[str, object]]:
    # Bytes: text mode would end a line at characters that JSON strings may hold, and lose the number of a
    # line that is not UTF-8.
    with _open(path) as lines:
        if lines.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
            try:
                rows = json.loads(lines.read())
            except (ValueError, RecursionError) as error:
                raise UnreadableFile(f"{path} begins as an array, and is no JSON: {error}.") from error
            yield from ((f"{path} row {number} (from 0)", row) for number, row in enumerate(rows))
            return
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:  # not JSON, or nested too deep
                row = UnreadableRow(f"not a line of JSON ({error}); it begins {line[:60]!r}")
            yield f"{path}:{number}", row


def _open(path: str) -> io.BufferedReader:
    codec = {".gz": "gzip", ".zst": "zstd"}.get(os.path.splitext(path)[1].lower())
    if codec is None:
        return open(path, "rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(path, codec))


def _read_parquet(path: str) -> Iterator[tuple[str, object]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in _rows(batch):
                    yield f"{path} row {number} (from 0)", _with_messages_as_written(row)
                    number += 1
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # a damaged file
        raise UnreadableFile(f"{path} is not a parquet file that pyarrow can read: {error}.") from error


def _with_messages_as_written(row: object) -> object:
    """Return a row whose messages, which are lists, have no fields that are None.

    Parquet gives every object in a column the union of all objects' fields, also the arguments of tool calls;
    those that are absent come back as None. In other columns None may have a meaning."""
    if not isinstance(row, dict):
        return row
    return {name: _without_absent(value) if isinstance(value, list) else value for name, value in row.items()}


def _without_absent(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_absent(part) for name, part in value.items() if part is not None}
    return [_without_absent(part) for part in value] if isinstance(value, list) else value


def _rows(batch: pyarrow.RecordBatch) -> list[object]:
    """Return the rows of a batch of a Parquet file. A value that Python cannot hold gives an UnreadableRow.

    Examples are a text that is not UTF-8 and a day after the year 9999. The rows of such a batch are read one
    by one."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if batch.num_rows > 1:
            return [row for at in range(batch.num_rows) for row in _rows(batch.slice(at, 1))]
        return [UnreadableRow(f"has a value that Python cannot hold: {error}")]
