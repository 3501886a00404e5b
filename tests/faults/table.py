"""The tables of docs/reliability.md and docs/cluster_failures.md: written by the tests that measure them
(`--write-table`), one row per case."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.cases import ACROSS_NODES, CASES, LAUNCHERS, Case
from tests.faults.harness import Outcome

DOCS = Path(__file__).parents[2] / "docs"
_WIDTH = 120


@dataclass(frozen=True)
class Table:
    """One table of a document. keys: the first columns of every row, in the order of the rows."""

    head: tuple[str, str]
    num_key_columns: int
    keys: Sequence[str]
    document: str = "reliability.md"

    @property
    def file(self) -> Path:
        return DOCS / self.document

    def rows(self, text: str | None = None) -> dict[str, str]:
        """Return key -> row of the table, in the order of the document, or of `text` if that is given."""
        lines = (self.file.read_text() if text is None else text).splitlines()
        start = lines.index(self.head[0]) + len(self.head)
        found = {}
        for line in lines[start:]:
            if not line.startswith("|"):
                break
            found["|".join(line.split("|")[: 1 + self.num_key_columns]) + "|"] = line
        return found

    def write(self, key: str, row: str) -> None:
        """Put a row where it belongs. Several processes may do this at a time."""
        with open(self.file, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            text = file.read()
            old = self.rows(text)
            new = old | {key: row}
            body = "\n".join((*self.head, *(new[k] for k in self.keys if k in new)))
            before, after = text.split("\n".join((*self.head, *old.values())))
            file.seek(0)
            file.truncate()
            file.write(before + body + after)


def key(case: Case, *before: str) -> str:
    return "".join(f"| {cell} " for cell in (*before, case.kind, case.victim, case.phase)) + "|"


_COLUMNS = "| fault | in | during | all is over after | within | exit code | the message begins |"
_ELSEWHERE = "cluster_failures.md"
FAILURES = Table((_COLUMNS, "|---|---|---|---|---|---|---|"), 3, [key(case) for case in CASES])
FAILURES_ON_RAY = Table(
    (f"| under {_COLUMNS}", "|---|---|---|---|---|---|---|---|"),
    4,
    [key(case, "Ray") for case in CASES],
    _ELSEWHERE,
)
FAILURES_ACROSS_NODES = Table(
    (f"| on two nodes under {_COLUMNS}", "|---|---|---|---|---|---|---|---|"),
    4,
    [key(case, launcher) for launcher in LAUNCHERS for case in ACROSS_NODES],
    _ELSEWHERE,
)


def row(case: Case, outcome: Outcome, *before: str) -> str:
    """Return the row of a case. before: cells in front of those of the case."""
    name, wait_s = case.noticed_after
    seconds = f"{name + ' + ' if name else ''}{max(outcome.seconds - wait_s, 0.0):.1f} s"
    cells = (seconds, f"{case.limit_s:g} s", outcome.exit_code, quoted(outcome.stderr))
    return key(case, *before) + "".join(f" {cell} |" for cell in cells)


def quoted(message: str, width: int = _WIDTH) -> str:
    """The beginning of a message's first line, as a cell."""
    said = next(iter(message.splitlines()), "").replace("|", "\\|")
    return f"`{said[:width]}{'...' if len(said) > width else ''}`" if said else "-"
