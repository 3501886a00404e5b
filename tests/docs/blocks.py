"""The fenced blocks of README.md, CONTRIBUTING.md and docs/*.md, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
}


@dataclass(frozen=True)
class Block:
    """What stands between two fences of a page."""

    page: str
    line: int
    """Of the opening fence."""
    language: str
    """Of the opening fence: "sh", "python", "json"; "" of a plain block."""
    text: str

    @property
    def first_line(self) -> str:
        """The block's name in the tables of the tests."""
        return self.text.splitlines()[0]

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.first_line})"


@dataclass(frozen=True)
class Command:
    """A line of a shell block as one would type it."""

    block: Block
    text: str
    """Without its comment; continued lines are joined."""
    typed: str = ""
    """What is then typed at pdb's prompt."""
    output: str = ""
    """What the page says that it prints, in blocks that begin with `$`."""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    def __str__(self) -> str:
        return f"{self.block.page}:{self.block.line}: {self.text}"


def blocks(text: str, page: str) -> Iterator[Block]:
    """Every fenced block of a page, in order. Raises: ValueError for a fence without an end."""
    opened: tuple[int, str] | None = None
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.fullmatch(r"\s*(`{3,}|~{3,})\s*(\w*).*", line)
        if fence and opened is None:
            opened, inside = (number, fence[2]), []
        elif fence:
            yield Block(page, *opened, "\n".join(inside))
            opened = None
        else:
            inside.append(line)
    if opened is not None:
        raise ValueError(f"{page}:{opened[0]}: the fence has no end.")


def blocks_of_all_pages() -> list[Block]:
    return [block for page, path in PAGES.items() for block in blocks(path.read_text(encoding="utf-8"), page)]


def commands(block: Block) -> list[Command]:
    """The commands of a `sh` block, or of a plain block with a session: "$ command", then its output."""
    if block.language != "sh" and not block.text.startswith("$ "):
        return []
    lines = re.sub(r"\s*\\\n\s*", " ", block.text).splitlines()
    if block.language != "sh":
        return [Command(block, lines[0].removeprefix("$ "), output="\n".join(lines[1:]))]
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith("(Pdb) "):
            found[-1][1].append(line.removeprefix("(Pdb) "))
        elif shlex.split(line, comments=True):
            found.append((re.sub(r"\s+# .*", "", line), []))
    return [Command(block, text.strip(), "\n".join(typed)) for text, typed in found]
