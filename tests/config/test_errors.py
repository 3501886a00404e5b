"""Rules of single fields: bounds in annotations, and what is proposed.

pytest tests/config/test_errors.py"""

from dataclasses import dataclass
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
    try_numbers,
)


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
