"""The table of docs/reliability.md: written by the tests that measure it (`--write-table`), one row per case."""

from __future__ import annotations

import fcntl
from pathlib import Path

from tests.faults.cases import CASES, Case
from tests.faults.harness import Outcome

DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability.md"
HEAD = (
    "| fault | in | during | all is over after | within | exit code | the message begins |",
    "|---|---|---|---|---|---|---|",
)
_WIDTH = 120


def key(case: Case) -> str:
    return f"| {case.kind} | {case.victim} | {case.phase} |"


def rows(document: str) -> dict[str, str]:
    """Beginning of each row -> the row, in the order of the table."""
    lines = document.splitlines()
    start = lines.index(HEAD[0]) + len(HEAD)
    found = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        found["|".join(line.split("|")[:4]) + "|"] = line
    return found


def row(case: Case, outcome: Outcome) -> str:
    said = next(iter(outcome.stderr.splitlines()), "").replace("|", "\\|")
    said = f"`{said[:_WIDTH]}{'...' if len(said) > _WIDTH else ''}`" if said else "-"
    name, wait_s = case.noticed_after
    seconds = f"{name + ' + ' if name else ''}{max(outcome.seconds - wait_s, 0.0):.1f} s"
    return f"{key(case)} {seconds} | {case.limit_s:g} s | {outcome.exit_code} | {said} |"


def write(case: Case, outcome: Outcome) -> None:
    """Put the case's row where it belongs. Several processes may do this at a time."""
    with open(DOCUMENT, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = file.read()
        old = rows(text)
        new = old | {key(case): row(case, outcome)}
        ordered = [new[key(c)] for c in CASES if key(c) in new]
        body = "\n".join((*HEAD, *ordered))
        before, after = text.split("\n".join((*HEAD, *old.values())))
        file.seek(0)
        file.truncate()
        file.write(before + body + after)
