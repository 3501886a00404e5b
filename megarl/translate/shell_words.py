"""Split a shell script into commands, and these into words, as bash does before it puts variables in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_CONTINUATION = re.compile(r"\\[ \t]*\r?\n")
_REDIRECTION = re.compile(r"(?:&>>?|<<<|<<-?|<>|[<>]&|>>|>\||[<>](?!\())[ \t]*")
_HEREDOC = re.compile(r"<<-?[ \t]*['\"\\]?([A-Za-z_]\w*)")
_BLANKS = " \t\r\n"


class Command(NamedTuple):
    """A command of a script.

    Args:
        words: as they are written, without comments and redirections.
        operator: what stands before it: && and || make it depend on the command before.
        groups: where the groups {...} and (...) begin that it is in.
        position: where it begins in the text."""

    words: list[str]
    operator: str = ";"
    groups: tuple[int, ...] = ()
    position: int = 0


def split_commands(text: str) -> Iterator[Command]:
    """Yield the commands of a script. Heredocs are left out; subshells and the bodies of functions are read
    like the rest."""
    words: list[str] = []
    heredocs: list[str] = []
    groups: list[int] = []
    operator = ";"
    begin = position = 0
    while position < len(text):
        letter = text[position]
        if letter == "#":
            position = _end_of_line(text, position)
        elif match := _CONTINUATION.match(text, position):
            position = match.end()
        elif redirection := _REDIRECTION.match(text, position):
            if heredoc := _HEREDOC.match(text, position):
                heredocs.append(heredoc[1])
            position = _end_of_word(text, redirection.end(), groups)
        elif letter in "\n;|&" or _is_bracket(text, position, bool(words), groups):
            if words:
                yield Command(words, operator, tuple(groups), begin)
            end = position + (2 if text[position : position + 2] in ("&&", "||", ";;") else 1)
            if letter in "({":
                groups.append(position)
            elif letter in ")}":
                del groups[-1:]
            elif words or letter != "\n":
                operator = text[position:end]
            words, position = [], end
            if letter == "\n":
                position = _skip_heredocs(text, position, heredocs)
        elif letter in _BLANKS:
            position += 1
        else:
            end = _end_of_word(text, position, groups)
            is_descriptor = text[position:end].isdigit() and text[end : end + 1] in ("<", ">")
            if not is_descriptor:
                begin = begin if words else position
                words.append(text[position:end])
            position = end
    if words:
        yield Command(words, operator, tuple(groups), begin)


def _is_bracket(text: str, position: int, is_within: bool, groups: list[int]) -> bool:
    """Return whether a group of commands begins or ends at `position`.

    Args:
        is_within: whether a command has begun."""
    letter, after = text[position], text[position + 1 : position + 2]
    if letter == "(":
        return not is_within and after not in ("(", ")")
    if letter == ")":
        return _is_in_subshell(text, groups)
    return letter in "{}" and after in (*_BLANKS, *";|&<>", "")


def _is_in_subshell(text: str, groups: list[int]) -> bool:
    return bool(groups) and text[groups[-1]] == "("


def _end_of_word(text: str, position: int, groups: list[int]) -> int:
    ends = " \t\r\n;|&" + ")" * _is_in_subshell(text, groups)
    while position < len(text) and text[position] not in ends:
        is_substitution = text[position] in "<>" and text[position + 1 : position + 2] == "("
        if text[position] in "<>" and not is_substitution:
            break
        position += is_substitution
        is_quote = text[position] in "'\"`"
        position = end_of_quote(text, position) + 1 if is_quote else end_of_group(text, position)
    return min(position, len(text))


def _end_of_line(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _skip_heredocs(text: str, position: int, delimiters: list[str]) -> int:
    """Return the position after the heredocs that begin at `position`, a line's start, and forget their
    delimiters. A heredoc whose delimiter is not found has no lines."""
    while delimiters:
        last = re.compile(rf"^\t*{delimiters.pop(0)}[ \t\r]*$", re.MULTILINE).search(text, position)
        position = last.end() if last else position
    return position


def end_of_quote(text: str, position: int) -> int:
    """Return where the quote that opens at `position` is closed."""
    quote, position = text[position], position + 1
    while position < len(text) and text[position] != quote:
        if text[position] == "\\" and quote != "'":
            position += 2
        elif text.startswith("$(", position) and quote == '"':
            position = end_of_group(text, position + 1)
        else:
            position += 1
    return min(position, len(text))


def end_of_group(text: str, position: int) -> int:
    """Return the position after the character at `position`, or after the closing bracket if a bracket opens
    there."""
    if text[position] == "\\":
        match = _CONTINUATION.match(text, position)
        return match.end() if match else position + 2
    if text[position] not in "({":
        return position + 1
    depth = 0
    heredocs: list[str] = []
    while position < len(text):
        letter = text[position]
        if letter == "#" and text[position - 1] in _BLANKS:  # a comment within an array
            position = _end_of_line(text, position)
            continue
        if letter == "\\":
            position += 2
            continue
        if (heredoc := _HEREDOC.match(text, position)) and text[position - 1] != "<":
            heredocs.append(heredoc[1])
        if letter in "'\"`":
            position = end_of_quote(text, position)
        depth += (letter in "({") - (letter in ")}")
        position += 1
        if letter == "\n":
            position = _skip_heredocs(text, position, heredocs)
        if depth == 0:
            break
    return min(position, len(text))
