"""Read training and evaluation data: files in verl's columns become a checked, in-memory list of prompts."""

from __future__ import annotations

import itertools
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import overload

from megarl.data.columns import Needs, Prompt, parse_row
from megarl.data.readers import UnreadableFile, UnreadableRow, read_rows

Path = str | os.PathLike[str]
_NUM_BAD_ROWS_SHOWN = 5


def read_prompts(path: Path, prompt_key: str, needs: Needs) -> Iterator[tuple[str, Prompt, list[str]]]:
    """Yield (where, prompt, problems) of each row of a file. A row with problems cannot be used.

    Raises: UnreadableFile, also after some rows."""
    for where, row in read_rows(os.fspath(path)):
        if isinstance(row, dict):
            yield where, *parse_row(row, prompt_key, needs)
        elif isinstance(row, UnreadableRow):
            yield where, Prompt(), [row.reason]
        else:
            yield where, Prompt(), [f"the row is a {type(row).__name__}, wanted an object with columns"]


def counted_rows(num_rows: int, num_files: int, first: int | None) -> str:
    """Return words for the rows that were read, such as "the first 64 rows" of one file.

    Args:
        num_rows: rows that were read of all files.
        first: limit of the rows that are read of each file. None: there is none."""
    rows = f"{num_rows} row{'s' if num_rows > 1 else ''}"
    if first is None or num_rows < first:
        return rows
    return f"the first {rows}" if num_files == 1 else f"{rows} (at most the first {first} of a file)"


class PromptDataset(Sequence[Prompt]):
    """The rows of all data files as `Prompt`s in memory, in the order of the files.

    The cursor (megarl/data/cursor.py) shuffles them, and the encoder makes token ids."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        files: Sequence[Path] = (),
        first: int | None = None,
        file_sizes: Sequence[int] = (),
    ):
        self._prompts, self._files = list(prompts), tuple(files)
        self.file_sizes = tuple(file_sizes)
        """Number of rows of each file."""
        self.first = first
        """Number of rows that were read of each file. None: all."""
        self._rows: Sequence[int] = range(len(self._prompts))  # their numbers in the files

    def only(self, rows: Sequence[int]) -> PromptDataset:
        """Return these rows, which ascend, as a data set of their own."""
        prompts = [replace(self[row], index=number) for number, row in enumerate(rows)]
        ends = [bisect_left(rows, end) for end in itertools.accumulate(self.file_sizes, initial=0)]
        sizes = [end - begin for begin, end in itertools.pairwise(ends)]
        made = PromptDataset(prompts, self._files, self.first, sizes)
        made._rows = rows
        return made

    @classmethod
    def load(
        cls,
        paths: Path | Sequence[Path],
        prompt_key: str = "prompt",
        needs: Needs = None,
        flag: str = "--train-data",
        first: int | None = None,
    ) -> PromptDataset:
        """Read *.jsonl and *.parquet files, one after another, and return their rows as a dataset.

        Columns are verl's: `data_source`, `prompt` (messages or a string), `reward_model.ground_truth`,
        `extra_info`, for fine-tuning `response`, or `messages` whose last turn is the assistant's, and for
        preferences `chosen` and `rejected`.
        Published GSM8K rows (`question`, `answer` ending in "#### n") are converted; see
        megarl/data/columns.py.

        Args:
            paths: one file or several.
            prompt_key: column of the prompt.
            needs: the part that every row must have besides a prompt: "ground_truth" for rewards, "response"
                for fine-tuning, "pair" for preferences.
            flag: the flag that named the files, for errors.
            first: number of rows to read of each file. None: all.
        Raises: ValueError that lists every unusable file, the number of bad rows, and the first five bad
        rows.
        """
        files = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        if not files:
            raise ValueError(f"{flag} names no file. Give one or more *.jsonl or *.parquet files.")
        prompts: list[Prompt] = []
        ends = [0]
        errors = _Errors(flag, len(files), first)
        for path in files:
            try:
                for where, prompt, problems in itertools.islice(read_prompts(path, prompt_key, needs), first):
                    errors.num_rows += 1
                    if problems:
                        errors.add_row(where, problems)
                    else:
                        prompt.index = len(prompts)
                        prompts.append(prompt)
            except UnreadableFile as problem:
                errors.files.append(str(problem))
            ends.append(len(prompts))
        errors.raise_if_any()
        return cls(prompts, files, first, [end - begin for begin, end in itertools.pairwise(ends)])

    def places(self, rows: Sequence[int]) -> list[str]:
        """Return the place of each of these rows, such as train.jsonl:12, by reading the files again.

        Places of all rows would take more memory than the rows of a small data set."""
        rows = [self._rows[row] for row in rows]
        wanted, found, row = set(rows), {row: f"row {row}" for row in rows}, 0
        for path in self._files:
            for where, _ in itertools.islice(read_rows(os.fspath(path)), self.first):
                if row in wanted:
                    found[row] = where
                row += 1
                if row > max(rows):
                    return [found[one] for one in rows]
        return [found[one] for one in rows]

    @property
    def counted_rows(self) -> str:
        """Words for the number of rows, which say whether these are only the first of the files."""
        return counted_rows(len(self), len(self._files), self.first)

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index):
        return self._prompts[index]


class _Errors:
    """Collects the errors in several files, to raise them as one ValueError."""

    def __init__(self, flag: str, num_files: int, first: int | None):
        self.flag, self.num_files, self.first = flag, num_files, first
        self.files: list[str] = []
        self.num_rows = 0
        self.num_bad_rows = 0
        self.shown: list[str] = []

    def add_row(self, where: str, problems: list[str]) -> None:
        self.num_bad_rows += 1
        if self.num_bad_rows <= _NUM_BAD_ROWS_SHOWN:
            self.shown.append(f"{where}: {'; '.join(problems)}")

    def raise_if_any(self) -> None:
        lines = [f"{self.flag}: {problem}" for problem in self.files]
        if self.num_bad_rows:
            hidden = self.num_bad_rows - len(self.shown)
            which = f"The first {len(self.shown)}:" if hidden else "They are:"
            rows = counted_rows(self.num_rows, self.num_files, self.first)
            lines.append(f"{self.flag}: {self.num_bad_rows} of {rows} cannot be used. {which}")
            lines += [f"  {line}" for line in self.shown]
        if lines:
            raise ValueError("\n".join(lines))
