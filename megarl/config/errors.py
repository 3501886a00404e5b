"""Report all errors of a configuration at once, and check the rules of single fields."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import math
import operator
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

from megarl.failures import ExplainedError

T = typing.TypeVar("T")
_MOST_LOOKED_AT = 1000
"""Number of names in a folder that are compared with a wrong name."""


Errors = Iterator[str]
"""Errors of a configuration, one line each: `flag (value): rule. Try another value.`"""
FieldRules = Iterable[tuple[bool, str, str]]
"""(whether it holds, field, text of the rule) of each rule of a section's fields."""


class ConfigError(ExplainedError, ValueError):
    """Error of a configuration that breaks rules.

    `errors` holds one line per broken rule: `flag (value): rule [place]`. If the checks are not complete, the
    text says that correcting these errors may show others."""

    read_on = "docs/configuration.md"

    def __init__(self, errors: Sequence[str], is_complete: bool = True) -> None:
        self.errors, self.is_complete = tuple(errors), is_complete
        head = [] if len(errors) == 1 else [f"{len(errors)} configuration errors:"]
        tail = (
            [] if is_complete else [f"More is checked when {'these are' if head else 'this is'} corrected."]
        )
        lines = [line if not head else f"  - {line}" for line in errors]
        super().__init__("\n".join(head + lines + tail))


class FieldErrors(ValueError):
    """Error of a dataclass whose fields break their rules. `errors` holds (field, value, rule) of each."""

    def __init__(self, errors: Sequence[tuple[str, object, str]]) -> None:
        self.errors = tuple(errors)
        super().__init__("; ".join(f"{name} ({value}): {rule}" for name, value, rule in errors))


class Rule(typing.NamedTuple):
    """A rule of one field, for its annotation: `save: Annotated[str, Rule(bool, "must name a folder.")]`."""

    holds: Callable[[typing.Any], object]
    words: str

    def error(self, value: object, default: object) -> str | None:
        """Return the text of the rule if the value breaks it, else None."""
        return None if self.holds(value) else self.words


class Bound(typing.NamedTuple):
    """A bound of a number, for the annotation of a field: `lr: Annotated[float, at_least(0)]`."""

    words: str
    holds: Callable[[float, float], bool]  # false for NaN
    limit: float

    def error(self, value: float, default: object) -> str | None:
        """Return the bound with a value to try, e.g. 'must be at least 1. Try 8.', if `value` is out of
        bounds, else None."""
        if self.holds(value, self.limit):
            return None
        has_number = isinstance(default, (int, float)) and not isinstance(default, bool)
        if has_number and self.holds(default, self.limit):
            advice = f"Try {default:g}."
        else:
            advice = f"Try {self.limit:g}." if self.words.startswith("at") else "Leave it out."
        return f"must be {self.words} {self.limit:.10g}. {advice}"


at_least = functools.partial(Bound, "at least", operator.ge)
above = functools.partial(Bound, "above", operator.gt)
at_most = functools.partial(Bound, "at most", operator.le)
below = functools.partial(Bound, "below", operator.lt)
Count = Annotated[int, at_least(1)]
Natural = Annotated[int, at_least(0)]
NonNegative = Annotated[float, at_least(0)]
Positive = Annotated[float, above(0)]
Seconds = Annotated[float, above(0), at_most(1_000_000)]
"""Time limit. c10d counts milliseconds in 32 bits, so 24 days would be the most."""
Fraction = Annotated[float, at_least(0), at_most(1)]
PositiveFraction = Annotated[float, above(0), at_most(1)]
Decay = Annotated[float, at_least(0), below(1)]


@functools.cache
def field_types(cls: type) -> dict[str, object]:
    """Return field -> resolved annotation of a dataclass, with the bounds and rules in `Annotated`."""
    return typing.get_type_hints(cls, include_extras=True)


def rules_in(hint: object) -> Iterator[Rule | Bound]:
    """Yield the rules of an annotation, or of X if the annotation is `X | None`."""
    yield from (item for item in getattr(hint, "__metadata__", ()) if isinstance(item, (Rule, Bound)))
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        yield one_of(*arguments)
    elif origin in (typing.Union, types.UnionType):
        members = [argument for argument in arguments if argument is not type(None)]
        yield from rules_in(members[0]) if len(members) == 1 else ()


def one_of(*choices: object) -> Rule:
    """Return the rule that a value is one of the choices."""
    *first, last = map(str, choices)
    words = f"{', '.join(first)} or {last}" if first else last
    return Rule(lambda value: value in choices, f"must be {words}.")


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def section(cls: type[T]) -> type[T]:
    """Return the class as a frozen, keyword-only dataclass with slots, the form of all sections of the
    configuration."""
    return dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls)


class Section:
    """Base of the dataclasses of the configuration. Creating one with values that break rules raises
    FieldErrors.

    The rules of an annotation do not apply to None."""

    __slots__ = ()

    def field_rules(self) -> FieldRules:
        """Return the rules that no annotation can state."""
        return ()

    def __post_init__(self) -> None:
        errors = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            for rule in rules_in(field_types(type(self))[field.name]) if value is not None else ():
                if error := rule.error(value, field.default):
                    errors.append((field.name, value, error))
        errors += [(name, getattr(self, name), rule) for holds, name, rule in self.field_rules() if not holds]
        if errors:
            raise FieldErrors(errors)


def raise_errors(errors: Sequence[str], is_complete: bool = True) -> None:
    """Raise ConfigError that lists the errors, if there are any.

    Args:
        is_complete: whether nothing else is checked once they are corrected."""
    if errors:
        raise ConfigError(errors, is_complete)


def did_you_mean(name: str, names: Iterable[str], prefix: str = "--", cutoff: float = 0.6) -> str:
    """Return ' Did you mean --lr?', or '' if no name is similar.

    Args:
        cutoff: required similarity of the names, from 0 to 1."""
    near = difflib.get_close_matches(name.replace("_", "-"), list(names), n=1, cutoff=cutoff)
    return f" Did you mean {prefix}{near[0]}?" if near else ""


def try_numbers(values: Iterable[int], near: int) -> str:
    """Return ' Try 64 or 128.' with the two values that are nearest to the refused value, or '' without
    values."""
    nearest = sorted(sorted(set(values), key=lambda value: abs(value - near))[:2])
    return f" Try {' or '.join(map(str, nearest))}." if nearest else ""


def must_divide(flag: str, number: int, what: str, size: int, fits: Iterable[int] | None = None) -> Errors:
    """Yield an error if the value of a flag does not divide a size.

    Args:
        fits: the numbers to propose. Default: the divisors of the size."""
    if size % number:
        advice = try_numbers(divisors(size) if fits is None else fits, number)
        yield f"{flag} ({number}): must divide {what} ({size}).{advice}"


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def nearest_path(path: Path, fits: Callable[[Path], bool]) -> Path | None:
    """Return the path in the same folder with the most similar name that `fits` accepts; None if there is
    none, or the folder cannot be read."""
    try:
        beside = list(itertools.islice(path.parent.iterdir(), _MOST_LOOKED_AT))
        found = sorted(one for one in beside if one != path and fits(one))
    except OSError:
        return None
    return max(
        found, key=lambda one: difflib.SequenceMatcher(None, one.name, path.name).ratio(), default=None
    )


def try_path(path: Path, fits: Callable[[Path], bool], otherwise: str) -> str:
    """Return ' Try data/train.jsonl.' with the path that `nearest_path` finds, or `otherwise` if it finds
    none."""
    found = nearest_path(path, fits)
    return f" Try {found}." if found is not None else f" {otherwise}"
