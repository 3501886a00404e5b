"""What a flag accepts, and the way from words to a value and back. Torch-free."""

from __future__ import annotations

import json
import shlex
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.config.gpus import visible_gpus

RankCount = typing.NewType("RankCount", int)
"""Ranks on a machine. `1-8` means as many of them as the machine has GPUs, and 8 where it has none."""
SCALARS = {"int": int, "float": float, "str": str}


class Word(typing.NamedTuple):
    """One word of the command line or of an args file. A quoted word of an args file is a value, whatever it
    looks like."""

    text: str
    quoted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """The type of a flag.

    Args:
        bases: of bool, int, low-high, float, json, str: tried in this order.
        choices: the accepted values, if there are only a few.
        many: the container of a flag that takes several words.
        one_or_many: a single word gives the bare value, several give the container.
        optional: the unquoted word `none` gives None.
    """

    bases: tuple[str, ...] = ("str",)
    choices: tuple[object, ...] = ()
    many: type | None = None
    one_or_many: bool = False
    optional: bool = False

    @property
    def is_bool(self) -> bool:
        return self.bases == ("bool",) and self.many is None

    @property
    def metavar(self) -> str:
        if self.is_bool:
            return ""
        one = (
            "{" + ",".join(map(str, self.choices)) + "}"
            if self.choices
            else "|".join(base.upper() for base in self.bases)
        )
        return f"{one} ..." if self.many else one

    def parse(self, words: Sequence[Word]) -> object:
        """The value of the words that follow a flag. Raises: ValueError(rule) that does not name the flag."""
        if self.optional and len(words) == 1 and words[0] == Word("none"):
            return None
        if self.many and not (self.one_or_many and len(words) == 1):
            return self.many(self._parse_one(word.text) for word in words)
        if len(words) != 1:
            raise ValueError(
                f"takes one value, not {len(words)}. Quote a value that has spaces."
                if words
                else "needs a value."
            )
        return self._parse_one(words[0].text)

    def _parse_one(self, text: str) -> object:
        if self.choices:
            for choice in self.choices:
                if text == str(choice):
                    return choice
            raise ValueError(
                f"must be one of {', '.join(map(str, self.choices))}{', or none' if self.optional else ''}."
            )
        for base in self.bases:
            try:
                return _PARSERS[base](text)
            except ValueError:
                continue
        raise ValueError(
            "must be "
            f"{' or '.join(_NAMES[base] for base in self.bases)}{', or none' if self.optional else ''}."
        )


def _parse_json(text: str) -> dict[str, object]:
    if not text.lstrip().startswith("{"):
        raise ValueError("not an object")
    return json.loads(text)


def _parse_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("not a boolean")
    return text == "true"


def _parse_int(text: str) -> int:
    if "_" in text:  # int() takes 1_000; vLLM's and Megatron's parsers print it back differently
        raise ValueError("not an integer")
    return int(text)


def _parse_low_high(text: str) -> int:
    low, high = map(_parse_int, text.split("-"))
    if not 1 <= low <= high:
        raise ValueError("not a range")
    gpus = visible_gpus()
    return min(max(gpus, low), high) if gpus else high


_PARSERS = {
    "bool": _parse_bool,
    "int": _parse_int,
    "low-high": _parse_low_high,
    "float": float,
    "json": _parse_json,
    "str": str,
}
_NAMES = {
    "bool": "true or false",
    "int": "a whole number",
    "low-high": "a range like 1-8",
    "float": "a number",
    "json": "a JSON object",
    "str": "text",
}


def kind_of_hint(hint: object) -> Kind:
    """The kind of a resolved annotation. Raises: TypeError for what no flag can carry."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        members = [argument for argument in arguments if argument is not type(None)]
        if len(members) == 1:
            return replace(kind_of_hint(members[0]), optional=len(members) < len(arguments))
    elif origin is typing.Literal:
        return Kind(choices=arguments)
    elif origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return replace(kind_of_hint(arguments[0]), many=tuple)
    elif hint is RankCount:
        return Kind(bases=("int", "low-high"))
    elif hint in (bool, int, float, str):
        return Kind(bases=(hint.__name__,))
    raise TypeError(
        f"no flag can carry {hint}; use bool, int, float, str, Literal, tuple[X, ...], or one of "
        "these or None"
    )


def format_flag(name: str, value: object) -> str:
    """One line of an args file that parses back to `value`."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    many = (
        sorted(value)
        if isinstance(value, (set, frozenset))
        else value
        if isinstance(value, (tuple, list))
        else [value]
    )
    return " ".join([f"--{name}", *map(_format_one, many)])


def _format_one(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return _quoted(json.dumps(value))
    if isinstance(value, str):
        plain = shlex.quote(value)
        return plain if plain[0] not in "-@" and plain != "none" else _quoted(value)
    return repr(value)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\"'\"'") + "'"
