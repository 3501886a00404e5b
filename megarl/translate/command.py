"""Define `megarl translate`: print the args file of another framework's configuration."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.frameworks.rows import as_list
from megarl.translate.arguments import write_arguments
from megarl.translate.sources import Source, read_file, read_words

DESCRIPTION = """\
Print the args file of a verl, TRL or slime configuration.

    megarl translate grpo.yaml > mine.args                  verl's YAML, or TRL's GRPOConfig as YAML or JSON
    megarl translate grpo.txt > mine.args                   a command of verl, TRL or slime
    megarl translate -- data.train_batch_size=128 ...       the same without a file

A command has all values put in, as a shell prints it: scripts and Python files are not read.

What has no counterpart, and what is only approximately the same, are comments. The exit code is 0, or 2 if
nothing can be translated."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "megarl translate",
        usage="megarl translate [--rows N] [--ranks N] FILE | -- WORD ...",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--rows",
        type=int,
        help="rows of the training data, to turn passes over it into --train-iters; default: those of the "
        "files, if they are here",
    )
    parser.add_argument("--ranks", type=int, help="processes that TRL was started with; default: as in FILE")
    separator = argv.index("--") if "--" in argv else len(argv)
    words = argv[separator + 1 :]
    parser.add_argument("file", nargs="?" if words else 1, metavar="FILE", help="configuration or command")
    options = parser.parse_args(argv[:separator])
    for name, value in (("rows", options.rows), ("ranks", options.ranks)):
        if value is not None and value < 1:
            raise ConfigError([f"--{name} ({value}): must be at least 1. Try 1000."])
    if words and options.file:
        raise ConfigError([f"FILE ({options.file}): name a file, or give words after --, not both."])
    source = read_words(words, f"-- ({words[0]})") if words else read_file(options.file[0])
    from megarl.algorithms import REGISTRY

    rows = options.rows or count_rows(source)
    sys.stdout.write(write_arguments(source, REGISTRY, rows, options.ranks))
    return 0


def count_rows(source: Source) -> int | None:
    """Return the number of rows of the training files; None if a file is missing, or is no JSON lines or
    Parquet file. A damaged file is a remark of the source."""
    names = ("data.train_files", "prompt-data", "train_dataset", "dataset_name")
    files = [Path(text).expanduser() for name in names for text in as_list(source.settings.get(name))]
    if not files or not all(file.is_file() and file.suffix in COUNTERS for file in files):
        return None
    try:
        return sum(COUNTERS[file.suffix](file) for file in files)
    except (OSError, ValueError) as error:  # of pyarrow, for a file that is cut off
        source.remarks.append(f"the rows of --train-data cannot be counted: {' '.join(str(error).split())}")
        return None


def _count_parquet(file: Path) -> int:
    import pyarrow.parquet

    return pyarrow.parquet.read_metadata(file).num_rows


def _count_lines(file: Path) -> int:
    with file.open("rb") as lines:
        return sum(bool(line.strip()) for line in lines)


COUNTERS = {".parquet": _count_parquet, ".jsonl": _count_lines}
"""Ending of a data file's name -> what counts its rows."""
