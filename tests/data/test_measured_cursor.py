"""The walk by measured rewards: which rows rest, in which order the others come, that none is lost, and that
it resumes exactly.

    pytest tests/data/test_measured_cursor.py"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.cursor import DataCursor
from megarl.data.measured_cursor import MeasuredCursor

ORDERS = ("shuffled", "easy-first", "hard-first")
RATES = st.sampled_from([None, 0.0, 0.25, 0.5, 0.75, 1.0])
LIMITS = st.sampled_from([(None, None), (0.0, None), (None, 1.0), (0.0, 1.0), (0.25, 0.75), (1.0, None)])


def test_the_example_of_the_module():
    cursor = MeasuredCursor(4, 0, False, order="easy-first", low=0.0, high=0.9, rest=1)
    assert cursor.next_rows(4) == [0, 1, 2, 3]
    for row, rate in enumerate([0.5, 1.0, 0.0, 0.75]):
        cursor.measure(row, rate)
    assert cursor.next_rows(2) == [3, 0] and cursor.num_resting == 2
    assert cursor.next_rows(4) == [1, 3, 0, 2] and cursor.num_resting == 0 and cursor.num_measured == 4


def test_without_limits_it_is_the_plain_walk():
    plain, measured = DataCursor(7, seed=3), MeasuredCursor(7, seed=3)
    for _ in range(9):
        rows = plain.next_rows(5)
        assert measured.next_rows(5) == rows
        for row in rows:
            measured.measure(row, row % 2)


@settings(max_examples=150, deadline=None)
@given(st.data(), LIMITS, st.integers(1, 3), st.integers(1, 9), st.sampled_from(ORDERS), st.booleans())
def test_rows_rest_as_the_rule_says_and_none_is_lost(data, limits, rest, num_rows, order, shuffle):
    """Pass by pass against the rule in plain Python."""
    low, high = limits
    cursor = MeasuredCursor(num_rows, 5, shuffle, order=order, low=low, high=high, rest=rest)
    rates, absent = {}, dict.fromkeys(range(num_rows), 0)
    for number in range(6):
        outside = [
            row
            for row, rate in rates.items()
            if (low is not None and rate <= low or high is not None and rate >= high) and absent[row] < rest
        ]
        resting = [] if len(outside) == num_rows else outside
        rows = cursor.next_rows(num_rows - len(resting))
        assert sorted([*rows, *resting]) == list(range(num_rows)), "each row is visited or rests"
        assert cursor.num_resting == len(resting)
        absent = {row: absent[row] + 1 if row in resting else 0 for row in range(num_rows)}
        assert max(absent.values()) <= rest
        known = [rates[row] for row in rows if row in rates]
        if order != "shuffled":
            assert known == sorted(known, reverse=order == "easy-first")
            assert all(row in rates for row in rows[: len(known)]), "rows without a rate come last"
        elif not shuffle:
            assert rows == sorted(rows)
        for row in rows:
            if (rate := data.draw(RATES)) is not None:
                rates[row] = rate
                cursor.measure(row, rate)


@settings(max_examples=100, deadline=None)
@given(st.data(), LIMITS, st.integers(1, 2), st.integers(1, 7), st.sampled_from(ORDERS))
def test_it_resumes_exactly(data, limits, rest, num_rows, order):
    make = lambda: MeasuredCursor(num_rows, 5, order=order, low=limits[0], high=limits[1], rest=rest)
    cursor, visits = make(), set()
    for _ in range(data.draw(st.integers(0, 8))):
        for visit, row in cursor.next_visits(data.draw(st.integers(1, 5))).items():
            assert visit not in visits
            visits.add(visit)
            cursor.measure(row, data.draw(st.sampled_from([0.0, 0.5, 1.0])))
    resumed = make().restored(json.loads(json.dumps(cursor.state())))
    for _ in range(6):
        ours, theirs = cursor.next_visits(3), resumed.next_visits(3)
        assert ours == theirs
        for row in ours.values():
            rate = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
            cursor.measure(row, rate)
            resumed.measure(row, rate)
    assert cursor.state() == resumed.state()


def test_a_run_may_begin_a_curriculum_and_not_drop_one():
    plain = DataCursor(5, seed=1)
    plain.next_rows(7)
    cursor = MeasuredCursor(5, 1, order="easy-first").restored(plain.state())
    assert cursor.next_rows(3) == plain.next_rows(3)
    with pytest.raises(ValueError, match="--curriculum.*Resume with"):
        DataCursor(5, seed=1).restored(cursor.state())
    with pytest.raises(ValueError, match="the training data has 6 rows"):
        MeasuredCursor(6, 1).restored(cursor.state())
