"""Find megarl's flag for a flag of another framework that a user has typed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.frameworks.rows import Row

_TOO_SHORT = {"n", "path", "name", "type", "model", "enable", "enabled", "seed", "mode", "len"}
"""Last parts of dotted names that say nothing alone."""


def find_row(name: str) -> Row | None:
    """Return the row of a setting, e.g. of trainer.save_freq or save-freq; None if no table has it.

    A row with a flag of ours comes before one without, then a full name before a name that only ends so:
    OpenRLHF's train_batch_size counts samples, verl's data.train_batch_size prompts."""
    name = name.replace("-", "_")
    found = [
        (bool(row.flags), is_full, row) for pattern, is_full, row in _patterns() if fnmatchcase(name, pattern)
    ]
    return max(found, key=lambda one: one[:2])[2] if found else None


@functools.cache
def _patterns() -> tuple[tuple[str, bool, Row], ...]:
    """Return (pattern of a name, whether it is the full name, its row), for all tables."""
    # built only for a flag that is not ours
    from megarl.frameworks import others, slime, trl, verl

    tables = (verl.TABLE, trl.TABLE, slime.TABLE, others.TABLE)
    return tuple(
        (ending, ending == name, row)
        for table in tables
        for row in table
        for name in row.names.replace("-", "_").split()
        for ending in _endings(name)
    )


def _endings(name: str) -> Iterator[str]:
    """Yield the forms, full or shortened, in which a user may write a setting's name; none for a pattern such
    as moe-*, which a typo of megarl's own flags would match."""
    if "*" in name and "." not in name:
        return
    parts = name.split(".")
    for start in range(len(parts)):
        ending = ".".join(parts[start:])
        if ending not in _TOO_SHORT and not ending.startswith("*"):
            yield ending


@functools.cache
def _sections() -> frozenset[str]:
    from megarl.frameworks import verl

    names = (name for row in verl.TABLE for name in row.names.split())
    return frozenset(name.partition(".")[0] for name in names if "." in name and not name.startswith("*"))


def is_override(word: str) -> bool:
    """Whether a word is one of verl's settings, e.g. trainer.nnodes=1 or +trainer.nnodes=1."""
    key, equals, _ = word.partition("=")
    section, dot, _ = key.lstrip("+~").partition(".")
    return bool(equals and dot) and section in _sections()
