"""Read flags from the command line and from args files, which are text files of flags as one would type them.

`#` starts a comment, shell quotes group a value (also over several lines), `~` and `${VAR}` mean what they
mean in a shell, `@other.args` includes another file, relative to the one that names it. A file's own flags
override those of the files that it includes, and the command line overrides all files."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megarl.config.errors import try_path
from megarl.config.flags import Word, build_flags
from megarl.config.roles import KINDS
from megarl.frameworks.answers import is_override

_SKIP = re.compile(r"(?:[ \t\r\n]|\\\n|#[^\n]*)*")
_WORD = re.compile(r"""(?:\\.|"(?:\\.|[^"\\])*"|'[^']*'|[^ \t\r\n"'\\])+""", re.DOTALL)
_PART = re.compile(
    r"""\\(?P<escaped>.)|"(?P<double>(?:\\.|[^"\\])*)"|'(?P<single>[^']*)'|(?P<plain>[^"'\\]+)""", re.DOTALL
)
_HOME = re.compile(r"(?<![^=@])~[^/=]*(?=/|$)")
_EXPANDED = re.compile(r"""\\([\\"$`\n])|\$(?:\{([^}]*)\}|([A-Za-z_]\w*))""")
_NO_TEXT = re.compile("[\x00\ud800-\udfff]")
COMMAND_LINE, DEFAULT = "command line", "default"
_NUMBERED = re.compile(rf"(no-)?({'|'.join(KINDS)})-([2-9]|[1-9][0-9]{{1,8}})-(.+)")


def number_and_base(name: str) -> tuple[int, str]:
    """Split a flag's name into the number of the actor that it addresses (1 if it names none) and the rest.

    Examples: critic-2-lr gives (2, "critic-lr"), lr gives (1, "lr")."""
    match = _NUMBERED.fullmatch(name)
    return (int(match[3]), f"{match[1] or ''}{match[2]}-{match[4]}") if match else (1, name)


def numbered(name: str, number: int) -> str:
    """Return a flag's name for the actor with this number, given the name for the first actor.

    Examples for the second actor: critic-lr gives critic-2-lr, seed gives actor-2-seed."""
    if number == 1:
        return name
    kind, _, rest = name.partition("-")
    return f"{kind}-{number}-{rest}" if kind in KINDS and rest else f"actor-{number}-{name}"


@dataclass(slots=True)
class Occurrence:
    """One use of a flag on the command line or in an args file.

    Args:
        name: without the dashes, e.g. critic-2-lr.
        number, base: the number of the flag's actor, and the name without it: 2, critic-lr.
        place: "file:line", or "command line".
        level: a higher level overrides a lower one. Each reading of a file is one level. The command line is
            the highest level.
        words: the words between this flag and the next.
    """

    name: str
    place: str
    level: int = 0
    words: list[Word] = field(default_factory=list)
    number: int = field(init=False)
    base: str = field(init=False)

    def __post_init__(self) -> None:
        self.number, self.base = number_and_base(self.name)

    def error(self, text: str) -> str:
        """Return the text of an error about the flag, such as "--lr (abc): must be a number.
        [run.args:3]"."""
        return f"{self}: {text} [{self.place}]"

    @property
    def value(self) -> str:
        """The words behind the flag, with a space before each: ' 1 2' of --flag 1 2."""
        return "".join(f" {word.text}" for word in self.words)

    def __str__(self) -> str:
        """Return the flag and its words as errors show them: --lr (abc)."""
        return f"--{self.name} ({self.value[1:]})" if self.words else f"--{self.name}"


class Reader:
    """Collects the flags of a command line and of the args files that it includes with @.

    After `read`, `occurrences` holds the flags with their levels, and `errors` the problems of reading."""

    def __init__(self) -> None:
        self.occurrences: list[Occurrence] = []
        self.errors: list[str] = []
        self.misses_flags = False
        """Whether a file, or the rest of one, could not be read. The flags in it are then not known."""
        self._is_cut = False
        self._level = 0
        self._overrides: list[tuple[str, str]] = []

    def read(self, argv: Iterable[str]) -> None:
        self._read_words(((Word(text), COMMAND_LINE) for text in argv), Path(), ())
        if self._overrides:
            (first, place), *others = self._overrides
            more = f" and {len(others)} more" if others else ""
            self._error(
                f"{first}{more}: key=value is how verl is set. `megarl translate -- {first} ...` prints the "
                "flags of all",
                place,
            )

    def read_defaults(self, words: Iterable[str]) -> None:
        """Read flags as defaults. Any flag that is read later overrides them."""
        self._read_words(((Word(text), DEFAULT) for text in words), Path(), ())

    def _read_words(
        self, words: Iterable[tuple[Word, str]], folder: Path, including: tuple[Path, ...]
    ) -> None:
        """Group words into flags and append these to `occurrences`. An included file is read first, so its
        flags get a lower level."""
        own: list[Occurrence] = []
        current: Occurrence | None = None
        for word, place in words:
            text = word.text
            if _NO_TEXT.search(text):  # no path has a zero byte, and args files are UTF-8
                self._error(f"{text!r}: has a zero byte, or is not UTF-8", place)
            elif not word.quoted and is_override(text) and not _takes_words(current):
                self._overrides.append((text, place))
            elif not word.quoted and text.startswith("@"):
                self._include(text[1:], folder, place, including)
                current = None
            elif not word.quoted and is_flag(text):
                name, equals, value = text.removeprefix("--").partition("=")
                current = Occurrence(name, place, words=[Word(value)] if equals else [])
                if text.startswith("--"):
                    own.append(current)
                else:
                    rule = "flags start with two dashes. A value that starts with one: --flag=value"
                    self._error(f"{text}: {rule}", place)
            elif current is not None:
                current.words.append(word)
            else:
                self._error(f"{text!r} follows no flag. Flags start with --, args files with @", place)
        if self._is_cut:  # the value of the last flag is not known
            self._is_cut, own = False, own[:-1]
        self._level += 1
        for occurrence in own:
            occurrence.level = self._level
        self.occurrences += own

    def _error(self, text: str, place: str) -> None:
        self.errors.append(f"{text} [{place}]")

    def _include(self, name: str, folder: Path, place: str, including: tuple[Path, ...]) -> None:
        path = folder / name
        try:
            resolved = path.resolve()
        except RuntimeError:  # symbolic links form a loop
            self._error(f"@{name!r}: is not the path of a file", place)
            self.misses_flags = True
            return
        if resolved in including:
            chain = " -> ".join(file.name for file in (*including, resolved))
            self._error(f"@{name}: the file includes itself: {chain}", place)
            return
        try:
            with path.open(encoding="utf-8", newline="") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a UTF-8 text file"
            advice = try_path(path, _is_args_file, "Give a text file of flags.")
            self._error(f"@{name}: cannot read {path}: {reason}.{advice}", place)
            self.misses_flags = True
            return
        self._read_words(self._split(text, str(path)), path.parent, (*including, resolved))

    def _split(self, text: str, path: str) -> Iterator[tuple[Word, str]]:
        """Yield (word, "file:line") for each word of an args file's text. An unclosed quote is added to
        `errors` and ends the reading."""
        position = _SKIP.match(text).end()
        counted, line = 0, 1
        while position < len(text):
            counted, line = position, line + text.count("\n", counted, position)
            place = f"{path}:{line}"
            match = _WORD.match(text, position)
            if match is None:
                rest = text[position:]
                unclosed = "a quote that is opened here is never closed"
                rule = "a backslash with nothing after it" if rest == "\\" else unclosed
                self._error(f"{rest.splitlines()[0]!r}: {rule}", place)
                self.misses_flags = self._is_cut = True
                return
            word = match.group()
            try:
                yield Word(_unquoted(word), word[0] in "'\""), place
            except KeyError as error:
                rule = f"the environment has no variable {error}. Set it, or quote the word with '"
                self._error(f"{word}: {rule}", place)
            position = _SKIP.match(text, match.end()).end()
            if position == match.end() < len(text):
                self._error(f"{match.group()!r}: a quote that is opened after this is never closed", place)
                self.misses_flags = self._is_cut = True
                return


def _takes_words(given: Occurrence | None) -> bool:
    """Return whether a flag takes several words, which may look like settings of verl, such as
    --env data.math=env.py:Class."""
    return given is not None and given.base.removeprefix("actor-") in _flags_of_words()


@functools.cache
def _flags_of_words() -> frozenset[str]:
    kinds = ((name, flag.kind) for name, flag in build_flags(None).items())
    of_job = (name for name, kind in kinds if kind.many and "str" in kind.bases and not kind.choices)
    return frozenset([*of_job, "teachers"])  # of an algorithm; which one, a later line may say


def _is_args_file(path: Path) -> bool:
    return path.suffix == ".args" and path.is_file()


def _unquoted(word: str) -> str:
    """Return a word without its quotes and backslashes, as a shell would read it; a backslash at the end of a
    line joins it with the next one.

    Raises: KeyError with the name of a variable that is not set."""
    text = ""
    for part in _PART.finditer(word):
        if part["double"] is not None:
            text += _EXPANDED.sub(_expanded, part["double"])
        elif part["escaped"] is not None:
            text += part["escaped"].strip("\n")
        else:
            plain = _HOME.sub(lambda found: os.path.expanduser(found[0]), part["plain"] or "")
            text += part["single"] or _EXPANDED.sub(_expanded, plain)
    return text


def _expanded(found: re.Match[str]) -> str:
    """Return an escaped character, or the value of a variable. Raises: KeyError with its name."""
    return os.environ[found[2] or found[3] or ""] if found[1] is None else found[1].strip("\n")


def is_flag(text: str) -> bool:
    """Return whether a word is a flag. Negative numbers and a single dash are values."""
    if not text.startswith("-") or text == "-":
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False
