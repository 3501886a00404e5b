"""Read the words of the commands in a shell script, with its variables put in.

Assignments, arrays, defaults (${NAME:-value}), arithmetic and quotes are understood. Conditions and loops are
not followed: the commands of all branches are read in their order. An assignment after && or || counts only
if the test before it says so."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from megarl.translate.shell_words import end_of_group, end_of_quote, split_commands

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*|\d)(\[[@*]\])?(?::?([-=+])([^{}]*))?\}|([A-Za-z_]\w*))")
"""${NAME}, ${NAME[@]}, ${NAME:-value}, $NAME: name, brackets, sign, value; or the name alone."""
_KEYWORDS = frozenset("if then elif else fi for while until do done case esac function".split())
_DECLARATIONS = frozenset("export local declare typeset readonly".split())
_TESTS = frozenset(("[", "[[", "test"))
_SUCCEEDING = frozenset(": true set cd source . echo mkdir export".split())
"""Commands that are taken to succeed when && or || follows."""
_COMPARISONS: dict[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "-eq": lambda left, right: int(left or 0) == int(right or 0),
    "-ne": lambda left, right: int(left or 0) != int(right or 0),
}
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
        lines: for each command that `commands` returns, the line on which it begins.
    """

    text: str
    environment: Mapping[str, str]
    has_branches: bool = False
    variables: dict[str, str | list[str]] = field(default_factory=dict)
    missing: dict[str, None] = field(default_factory=dict)
    lines: list[int] = field(default_factory=list)

    def commands(self) -> list[list[str]]:
        """Return the words of every command, without assignments."""
        found = []
        succeeded: bool | None = True  # the command before; None if that is not known
        groups: dict[int, bool | None] = {}  # whether the commands of a group {...} run
        for command in split_commands(self.text):
            words, is_declaration = self._without_keywords(command.words)
            if command.operator in ("&&", "||"):
                is_run = None if succeeded is None else succeeded == (command.operator == "&&")
            else:
                is_run = True
            for group in command.groups:
                both = (is_run, groups.setdefault(group, is_run))
                is_run = False if False in both else None if None in both else True
            while words and (match := _ASSIGNMENT.match(words[0])):
                self.has_branches |= command.operator in ("&&", "||") or not is_run
                self._assign(match, words[0][match.end() :], is_run)
                words = words[1:]
            if words and not is_declaration:
                found.append([text for word in words for text in self._expand_word(word)])
                self.lines.append(self.text.count("\n", 0, command.position) + 1)
            if is_run is not False:
                succeeded = self._succeeds(words) if is_run else None
        return found

    def _without_keywords(self, words: list[str]) -> tuple[list[str], bool]:
        """Return a command without leading keywords, and whether it only declares variables."""
        self.has_branches |= bool(words) and words[0] in _KEYWORDS
        while words and words[0] in _KEYWORDS:
            words = words[1:]
        is_declaration = bool(words) and words[0] in _DECLARATIONS
        while words and (words[0] in _DECLARATIONS or is_declaration and words[0].startswith("-")):
            words = words[1:]
        return words, is_declaration

    def _succeeds(self, words: list[str]) -> bool | None:
        """Return whether a command succeeds; None if that is not known. Unset variables are empty."""
        if not words or words[0] in _SUCCEEDING:
            return True
        if words[0] not in _TESTS or any(text in word for word in words for text in ("$(", "`", "*")):
            return None
        texts = [re.sub(rf"{_VARIABLE.pattern}|\$\d", "", self._text(word)) for word in words[1:]]
        if any("$" in text for text in texts):
            return None
        match texts[: len(texts) - (words[0] != "test")]:
            case [text]:
                return bool(text)
            case ["-z", text]:
                return not text
            case ["-n", text]:
                return bool(text)
            case [left, comparison, right] if comparison in _COMPARISONS:
                try:
                    return _COMPARISONS[comparison](left, right)
                except ValueError:
                    return None
        return None

    def _assign(self, match: re.Match[str], value: str, is_run: bool | None) -> None:
        """Set a variable.

        Args:
            match: the name, and + if the value is appended.
            is_run: whether the script does so; None if a condition decides that is not known. Then the value
                counts only if there is no other."""
        name, appends = match[1], bool(match[2])
        if is_run is False or (is_run is None and (appends or self._is_set(name))):
            return
        if value.startswith("("):
            items = [
                text
                for command in split_commands(value[1:-1])
                for word in command.words
                for text in self._expand_word(word)
            ]
            before = self.variables.get(name, [])
            self.variables[name] = [*before, *items] if appends and isinstance(before, list) else items
        else:
            before = self.variables.get(name, "") if appends else ""
            array = self._array(value)
            text = self._text(value) if array is None else " ".join(array)
            self.variables[name] = f"{before}{text}"

    def _is_set(self, name: str) -> bool:
        return name in self.variables or name in self.environment

    def _array(self, word: str) -> list[str] | None:
        """Return the items of the array that a word stands for, none for $@ and an unset array; None for any
        other word."""
        bare = word.strip('"')
        match = _VARIABLE.fullmatch(bare)
        value = self.variables.get(match[1] or match[5]) if match else None
        if isinstance(value, list):
            return value
        if match and match[2] and value is None:
            self.missing[match[1]] = None
            return []
        return [] if bare in ("$@", "$*", "${@}") else None

    def _expand_word(self, word: str) -> list[str]:
        """Return the texts that a word becomes: several for an array, and for a variable without quotes whose
        value has blanks."""
        array = self._array(word)
        if array is not None:
            return array if word.startswith('"') else [text for item in array for text in item.split()]
        fields = [("", False)]  # the text, and whether a part of it is quoted
        for text, is_quoted in self._parts(word):
            is_whole = is_quoted or "$(" in text or "`" in text
            first, *others = [text] if is_whole else re.split(r"[ \t\n]+", text)
            fields[-1] = (fields[-1][0] + first, fields[-1][1] or is_quoted)
            fields += [(text, False) for text in others]
        return [text for text, is_quoted in fields if text or is_quoted]

    def _text(self, word: str) -> str:
        """Return a word with variables put in, without splitting it at blanks."""
        return "".join(text for text, _ in self._parts(word))

    def _parts(self, word: str) -> Iterator[tuple[str, bool]]:
        """Yield the parts of a word with variables put in, and whether a part is quoted."""
        position = 0
        while position < len(word):
            if word[position] in "'\"":
                end = end_of_quote(word, position)
                text = word[position + 1 : end]
                if word[position] == '"':
                    text = self._expand(re.sub(r'\\(["\\$`])', r"\1", re.sub(r"\\\r?\n", "", text)))
                yield text, True
                position = end + 1
            elif word[position] == "\\":
                end = end_of_group(word, position)
                if not word[position:end].endswith("\n"):
                    yield word[position + 1 : end], True
                position = end
            else:
                end = position
                while end < len(word) and word[end] not in "'\"\\":
                    end = end_of_group(word, end)
                yield self._expand(word[position:end]), False
                position = end

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
