"""Write text of models and files to a terminal, within its width and without letting the text control it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator

_SHOWN_AS_CODE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of characters that a terminal obeys or does not show."""
_MIN_WIDTH = 20


def visible(text: str) -> str:
    """Return the text with its control characters as escapes such as \\x1b. Line feeds stay."""
    return "".join(
        ascii(character)[1:-1]
        if unicodedata.category(character) in _SHOWN_AS_CODE and character != "\n"
        else character
        for character in text
    )


def width() -> int:
    """Return the number of columns of the terminal, or COLUMNS of the environment. Output that goes elsewhere
    is not wrapped."""
    return max(_MIN_WIDTH, shutil.get_terminal_size((sys.maxsize, 0)).columns)


def fold(text: str, columns: int) -> Iterator[str]:
    """Yield the lines of a text, each at most so many columns wide. Lines break at spaces if there are any.

    The text is made visible first, and no other character is changed or lost."""
    from rich.cells import get_character_cell_size

    for line in visible(text).split("\n"):
        begin = used = space = 0
        for at, character in enumerate(line):
            size = get_character_cell_size(character)
            if used + size > columns:
                end = space if space > begin else at
                yield line[begin:end]
                begin = end
                used = sum(map(get_character_cell_size, line[begin:at]))
            used += size
            if character == " ":
                space = at + 1
        yield line[begin:]


def block(title: str, text: str, columns: int) -> Iterator[str]:
    """Yield the lines of a titled text, which is indented by two columns."""
    yield title
    yield from (f"  {line}" for line in fold(text, columns - 2))


def write(lines: Iterable[str]) -> None:
    """Write lines to stdout. A reader that stops, as `head` does, is not an error."""
    with closed_pipe_is_the_end():
        for line in lines:
            sys.stdout.write(encodable(line) + "\n")
        sys.stdout.flush()


def encodable(text: str) -> str:
    """Return the text with escapes for the characters that the encoding of stdout lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


@contextlib.contextmanager
def closed_pipe_is_the_end() -> Iterator[None]:
    """End the body without an error when nobody reads stdout any more."""
    try:
        yield
    except BrokenPipeError:
        # Python would flush stdout once more at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
