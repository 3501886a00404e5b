"""The tables of docs/reliability.md: written by the tests that measure them (`--write-table`), one row per
case."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.cases import CASES, Case
from tests.faults.harness import Outcome

DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability.md"
_WIDTH = 120


@dataclass(frozen=True)
class Table:
    """One table of the document. keys: the first columns of every row, in the order of the rows."""

    head: tuple[str, str]
    num_key_columns: int
    keys: Sequence[str]

    def rows(self, document: str) -> dict[str, str]:
        """Key -> the row, in the order of the document."""
        lines = document.splitlines()
        start = lines.index(self.head[0]) + len(self.head)
        found = {}
        for line in lines[start:]:
            if not line.startswith("|"):
                break
            found["|".join(line.split("|")[: 1 + self.num_key_columns]) + "|"] = line
        return found

    def write(self, key: str, row: str) -> None:
        """Put a row where it belongs. Several processes may do this at a time."""
        with open(DOCUMENT, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            text = file.read()
            old = self.rows(text)
            new = old | {key: row}
            body = "\n".join((*self.head, *(new[k] for k in self.keys if k in new)))
            before, after = text.split("\n".join((*self.head, *old.values())))
            file.seek(0)
            file.truncate()
            file.write(before + body + after)


def key(case: Case) -> str:
    return f"| {case.kind} | {case.victim} | {case.phase} |"


FAILURES = Table(
    (
        "| fault | in | during | all is over after | within | exit code | the message begins |",
        "|---|---|---|---|---|---|---|",
    ),
    3,
    [key(case) for case in CASES],
)


def row(case: Case, outcome: Outcome) -> str:
    name, wait_s = case.noticed_after
    seconds = f"{name + ' + ' if name else ''}{max(outcome.seconds - wait_s, 0.0):.1f} s"
    return f"{key(case)} {seconds} | {case.limit_s:g} s | {outcome.exit_code} | {quoted(outcome.stderr)} |"


def quoted(message: str, width: int = _WIDTH) -> str:
    """The beginning of a message's first line, as a cell."""
    said = next(iter(message.splitlines()), "").replace("|", "\\|")
    return f"`{said[:width]}{'...' if len(said) > width else ''}`" if said else "-"
