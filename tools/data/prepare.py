"""Read a published data set from local files and write rows that `--train-data` takes.

Every row is written, or left out for a reason that is counted and printed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megarl.data.columns import parse_row
from megarl.data.readers import UnreadableFile, UnreadableRow, read_rows

Row = dict[str, object]
BOXED_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
"""What verl's own script appends to the problems of MATH."""
_SUFFIXES = (".jsonl", ".parquet")


class LeftOut(ValueError):
    """Raised by a converter for a row that cannot be used; the text is the reason."""


class WrongColumns(ValueError):
    """Raised by a converter for a row that is not of this data set. The text names the columns it wants."""


def main(description: str, convert: Callable[[Row], Row], argv: Sequence[str] | None = None) -> int:
    """Convert the files of the command line. Returns the exit code.

    Args:
        description: text of --help.
        convert: makes a row of the data set into one of ours. `extra_info.index` is added."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="*.parquet or *.jsonl, as published")
    parser.add_argument("--out", required=True, help="*.jsonl or *.parquet file to write")
    arguments = parser.parse_args(argv)
    out = Path(arguments.out)
    if error := _out_error(out):
        sys.stderr.write(f"{error}\n")
        return 2
    left_out: Counter[str] = Counter()
    try:
        rows = list(_converted(arguments.files, convert, left_out))
        if not rows:
            raise ValueError(
                f"FILE ({', '.join(arguments.files)}): every row was left out: {dict(left_out)}."
            )
        write_rows(out, rows)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for reason, count in left_out.most_common():
        sys.stdout.write(f"left out: {count} rows: {reason}\n")
    sys.stdout.write(f"{out}: {len(rows)} rows\n")
    return 0


def _out_error(out: Path) -> str | None:
    if out.suffix not in _SUFFIXES:
        return f"--out ({out}): must end in {' or '.join(_SUFFIXES)}. Try {out.with_suffix('.parquet')}."
    if out.exists():
        return f"--out ({out}): exists. Remove it, or try {out.with_stem(f'{out.stem}_2')}."
    return None


def _converted(files: Sequence[str], convert: Callable[[Row], Row], left_out: Counter[str]) -> Iterator[Row]:
    """Yield the rows that can be used, and count the others by reason."""
    index = 0
    for file in files:
        try:
            for place, row in read_rows(file):
                if isinstance(row, UnreadableRow) or not isinstance(row, dict):
                    raise ValueError(f"{place}: {getattr(row, 'reason', 'is not an object with columns')}")
                try:
                    converted = convert(row)
                except WrongColumns as error:
                    raise ValueError(f"{place}: {error}. There: {', '.join(row)}.") from error
                except LeftOut as reason:
                    left_out[str(reason)] += 1
                    continue
                converted["extra_info"] = {"index": index, **converted.get("extra_info", {})}
                index += 1
                if problems := parse_row(converted, "prompt", None)[1]:
                    raise ValueError(f"{place}: {'; '.join(problems)}")
                yield converted
        except UnreadableFile as error:
            raise ValueError(f"FILE ({file}): {error}") from error


def write_rows(out: Path, rows: Sequence[Row]) -> None:
    """Write a *.jsonl or *.parquet file, which appears when it is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    if out.suffix == ".jsonl":
        with open(partial, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), partial)
    os.replace(partial, out)


def texts(row: Row, *columns: str) -> list[str]:
    """Return columns that must be strings. Raises: WrongColumns."""
    for column in columns:
        if not isinstance(row.get(column), str):
            raise WrongColumns(f"wanted the columns {', '.join(columns)} with strings")
    return [row[column] for column in columns]


def user(text: str) -> list[dict[str, str]]:
    """Return a conversation of one user's message."""
    return [{"role": "user", "content": text}]
