"""Read the words of the commands in a shell script, with its variables put in.

Assignments, arrays, defaults (${NAME:-value}), arithmetic and quotes are understood. Conditions and loops are
not followed: the commands of all branches are read in their order."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*|\d)(\[[@*]\])?(?::?([-=+])([^{}]*))?\}|([A-Za-z_]\w*))")
"""${NAME}, ${NAME[@]}, ${NAME:-value}, $NAME: name, brackets, sign, value; or the name alone."""
_KEYWORDS = frozenset("if then elif else fi for while until do done case esac function".split())
_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass
class Script:
    """The commands of a shell script.

    Args:
        text: of the script.
        environment: variables that are set before it runs.
        has_branches: whether it has conditions or loops, which are not followed.
        missing: arrays that the script uses and does not set.
    """

    text: str
    environment: Mapping[str, str]
    has_branches: bool = False
    variables: dict[str, str | list[str]] = field(default_factory=dict)
    missing: dict[str, None] = field(default_factory=dict)

    def commands(self) -> list[list[str]]:
        """Return the words of every command, without assignments."""
        found = []
        for words in _split(self.text):
            self.has_branches |= bool(words) and words[0] in _KEYWORDS
            while words and words[0] in (*_KEYWORDS, "export", "local", "declare", "readonly"):
                words = words[1:]
            while words and (match := _ASSIGNMENT.match(words[0])):
                self._assign(match[1], bool(match[2]), words[0][match.end() :])
                words = words[1:]
            if words:
                found.append([text for word in words for text in self._expand_word(word)])
        return found

    def _assign(self, name: str, appends: bool, value: str) -> None:
        if value.startswith("("):
            items = [
                text for words in _split(value[1:-1]) for word in words for text in self._expand_word(word)
            ]
            before = self.variables.get(name, [])
            self.variables[name] = [*before, *items] if appends and isinstance(before, list) else items
        else:
            before = self.variables.get(name, "") if appends else ""
            self.variables[name] = f"{before}{' '.join(self._expand_word(value))}"

    def _expand_word(self, word: str) -> list[str]:
        """Return the texts that a word becomes: several for an array or an unquoted list, none for $@."""
        match = _VARIABLE.fullmatch(word.strip('"'))
        value = self.variables.get(match[1] or match[5]) if match else None
        if isinstance(value, list):
            return value
        if match and match[2] and value is None:
            self.missing[match[1]] = None
            return []
        if word in ("$@", '"$@"', "$*", "${@}", '"${@}"'):
            return []
        if match and not word.startswith('"') and isinstance(value, str) and " --" in f" {value}":
            return value.split()
        return [self._unquote(word)]

    def _unquote(self, word: str) -> str:
        text, position = "", 0
        while position < len(word):
            if word[position] == "'":
                end = word.find("'", position + 1)
                end = len(word) if end < 0 else end
                text += word[position + 1 : end]
                position = end + 1
            elif word[position] == '"':
                end = _end_of_quote(word, position)
                text += self._expand(re.sub(r'\\(["\\$`])', r"\1", word[position + 1 : end]))
                position = end + 1
            elif word[position] == "\\":
                text += word[position + 1 : position + 2]
                position += 2
            else:
                end = position
                while end < len(word) and word[end] not in "'\"\\":
                    end = _end_of_group(word, end)
                text += self._expand(word[position:end])
                position = end
        return text

    def _expand(self, text: str) -> str:
        """Put in variables, innermost first, and compute $((...)); what is unknown stays as it is."""
        for _ in range(10):
            before = text
            text = _VARIABLE.sub(self._value, text)
            if text == before:
                break
        return re.sub(r"\$\(\(([^$`]*?)\)\)(?!\))", lambda match: self._compute(match), text)

    def _value(self, match: re.Match) -> str:
        name, how, other = match[1] or match[5], match[3], match[4]
        value = self.variables.get(name, self.environment.get(name))
        if how in ("-", "=") and not value:
            return _plain(other)
        if how == "+":
            return _plain(other) if value else ""
        if value is None:
            return match[0]
        return " ".join(value) if isinstance(value, list) else value

    def _compute(self, match: re.Match) -> str:
        names = {name: self.variables.get(name) for name in re.findall(r"[A-Za-z_]\w*", match[1])}
        text = re.sub(r"[A-Za-z_]\w*", lambda name: str(names[name[0]]), match[1])
        try:
            return str(_number(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return match[0]


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_number(left), _number(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
    raise ValueError(ast.dump(node))


def _plain(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _split(text: str) -> Iterator[list[str]]:
    """Yield the words of each command as they are written, without comments."""
    text = re.sub(r"\\[ \t]*\r?\n", " ", text)
    words: list[str] = []
    position, start = 0, None
    while position <= len(text):
        letter = text[position] if position < len(text) else "\n"
        if letter == "#" and start is None:
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
            continue
        if letter in " \t\r\n;|&":
            if start is not None:
                words.append(text[start:position])
                start = None
            if letter in "\n;|&":
                if words:
                    yield words
                words = []
            position += 1
            continue
        start = position if start is None else start
        position = _end_of_quote(text, position) + 1 if letter in "'\"" else _end_of_group(text, position)
    if words:
        yield words


def _end_of_quote(text: str, position: int) -> int:
    """Return where the quote that opens at `position` is closed."""
    quote, position = text[position], position + 1
    while position < len(text) and text[position] != quote:
        position += 2 if text[position] == "\\" and quote == '"' else 1
    return position


def _end_of_group(text: str, position: int) -> int:
    """Return the position after the character at `position`, or after the closing bracket if a bracket opens
    there."""
    if text[position] == "\\":
        return position + 2
    if text[position] not in "({":
        return position + 1
    depth = 0
    while position < len(text):
        letter = text[position]
        if letter == "#" and text[position - 1] in " \t\n":  # a comment within an array
            position = text.find("\n", position)
            if position < 0:
                return len(text)
            continue
        if letter in "'\"":
            position = _end_of_quote(text, position)
        depth += (letter in "({") - (letter in ")}")
        position += 1
        if depth == 0:
            break
    return position
