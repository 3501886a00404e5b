"""Rules of single fields: bounds in annotations, and what is proposed.

pytest tests/config/test_errors.py"""

import math
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Annotated

import pytest

from megarl.config.errors import (
    Count,
    Decay,
    FieldErrors,
    Fraction,
    Positive,
    Rule,
    Section,
    above,
    at_least,
    divisors,
    field_types,
    rules_in,
    try_numbers,
)
from megarl.config.mesh import group_timeout
from megarl.config.schema import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Small(Section):
    """a section with a field of each kind"""

    count: Count = 3
    share: Fraction = 0.5
    decay: Decay = 0.9
    timeout: Positive | None = None
    length: Annotated[int, at_least(2)] | None = 4
    ratio: Annotated[float, above(1)] = 10.0
    name: str = "a"
    words: Annotated[tuple[str, ...], Rule(all, "must hold no empty string.")] | None = ()

    def field_rules(self):
        return [(self.name != "", "name", "must not be empty.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Smaller(Small):
    """has the bounds of its base class too"""

    epochs: Count = 1


@pytest.mark.parametrize(
    "values, errors",
    [
        ({}, []),
        ({"timeout": None, "length": None, "words": None}, []),  # None keeps all rules
        ({"share": 1.0, "count": 1}, []),
        ({"count": 0}, ["count (0): must be at least 1. Try 3."]),
        ({"share": 1.5}, ["share (1.5): must be at most 1. Try 0.5."]),
        ({"share": float("nan")}, ["share (nan): must be at least 0. Try 0.5.", "at most 1. Try 0.5."]),
        ({"decay": 1}, ["decay (1): must be below 1. Try 0.9."]),
        ({"timeout": 0.0}, ["timeout (0.0): must be above 0. Leave it out."]),  # its default is no number
        ({"length": 1}, ["length (1): must be at least 2. Try 4."]),
        ({"ratio": 1.0}, ["ratio (1.0): must be above 1. Try 10."]),
        ({"words": ("a", "")}, ["words (('a', '')): must hold no empty string."]),
        (
            {"name": "", "epochs": 0},
            ["epochs (0): must be at least 1. Try 1.", "name (): must not be empty."],
        ),
    ],
)
def test_bounds_of_fields(values, errors):
    if not errors:
        assert Smaller(**values)
        return
    with pytest.raises(FieldErrors) as caught:
        Smaller(**values)
    assert all(error in str(caught.value) for error in errors) and len(caught.value.errors) == len(errors)


def test_the_default_is_proposed_only_where_it_is_a_number_within_the_bound():
    assert at_least(2).error(1, None) == "must be at least 2. Try 2."
    assert above(2).error(1, None) == "must be above 2. Leave it out."
    assert at_least(0).error(-1, True) == "must be at least 0. Try 0."
    assert at_least(2).error(1, 1) == "must be at least 2. Try 2."


def test_numbers_that_are_proposed():
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(9) == [1, 3, 9]
    assert try_numbers(divisors(12), 5) == " Try 4 or 6." and try_numbers([], 5) == ""


LIMITS = [
    (section, field)
    for section in field_types(TrainConfig).values()
    if isinstance(section, type) and issubclass(section, Section)
    for field in field_types(section)
    if field.endswith("_s")
]


@pytest.mark.parametrize("section, field", LIMITS, ids=lambda value: getattr(value, "__name__", value))
def test_every_time_limit_is_one_that_a_clock_can_hold(section, field):
    """torch's store counts milliseconds in 32 bits. A process group waits for longer than a call."""
    (default,) = (f.default for f in fields(section) if f.name == field)
    rules = [*rules_in(field_types(section)[field])]

    def found(value: float) -> list[str]:
        return [error for rule in rules if (error := rule.error(value, default))]

    for value in (math.inf, 1e14, 1_000_001.0):
        assert found(value) == [f"must be at most 1000000. Try {default:g}."]
    assert found(0.0) == [f"must be above 0. Try {default:g}."] and found(math.nan) != []
    assert found(1e6) == [] and group_timeout(1e6) / timedelta(milliseconds=1) < 2**31


def test_the_time_limits_are_found():
    assert {field for _, field in LIMITS} >= {"call_timeout_s", "exit_grace_s", "reward_timeout_s"}
