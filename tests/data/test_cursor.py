"""The cursor walks every row once per pass, in an order that depends on seed and pass alone, and resumes
exactly."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.cursor import DataCursor


@pytest.mark.parametrize("n", [1, 3, 7, 10, 23])
def test_every_pass_holds_every_row_once(n):
    cursor, num_rows, num_passes = DataCursor(10, seed=3), 10, 23
    rows = [row for _ in range(num_rows * num_passes // n + 1) for row in cursor.next_rows(n)][
        : num_rows * num_passes
    ]
    passes = [rows[start : start + num_rows] for start in range(0, len(rows), num_rows)]
    assert all(sorted(one_pass) == list(range(num_rows)) for one_pass in passes)
    assert (
        len({tuple(one_pass) for one_pass in passes}) == num_passes
    )  # 10! orders: a repeat has chance < 1e-4


def test_order_does_not_depend_on_batch_size():
    small, large = DataCursor(17, seed=1), DataCursor(17, seed=1)
    assert [small.next_rows(1)[0] for _ in range(60)] == large.next_rows(60)


def test_seed_changes_the_order_and_no_shuffle_keeps_it():
    assert DataCursor(50, seed=0).next_rows(50) != DataCursor(50, seed=1).next_rows(50)
    assert DataCursor(3, shuffle=False).next_rows(8) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_first_position_is_uniform():
    first = Counter(DataCursor(4, seed=seed).next_rows(1)[0] for seed in range(2000))
    # 500 each expected, standard deviation 19: five of them.
    assert set(first) == {0, 1, 2, 3} and all(abs(count - 500) < 97 for count in first.values())


@pytest.mark.parametrize("taken", [0, 4, 10, 11, 35])
def test_restored_cursor_goes_on_exactly(taken):
    cursor = DataCursor(10, seed=5)
    cursor.next_rows(taken)
    restored = DataCursor(10).restored(json.loads(json.dumps(cursor.state())))
    assert restored.next_rows(40) == cursor.next_rows(40)


def test_checkpoints_of_before_visits_were_counted_go_on():
    cursor = DataCursor(10, seed=5)
    cursor.next_visits(23)
    state = {name: value for name, value in cursor.state().items() if name != "visits"}
    assert DataCursor(10).restored(state).next_visits(3) == cursor.next_visits(3)


CALLS = st.one_of(st.integers(0, 30), st.lists(st.integers(0, 11), max_size=5))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.lists(CALLS, max_size=12), st.data())
def test_a_visit_is_counted_once_in_a_run(num_rows, calls, data):
    """Whatever is asked for, batches of the walk or rows by name, and wherever the run goes on from a
    checkpoint."""
    cursor, walk = DataCursor(num_rows, seed=3), DataCursor(num_rows, seed=3)
    visits, walked = [], []
    for call in calls:
        made = cursor.next_visits(call) if isinstance(call, int) else cursor.visit(call)
        assert list(made.values()) == (walk.next_rows(call) if isinstance(call, int) else call)
        visits += made
        walked += list(made.values()) if isinstance(call, int) else []
        if data.draw(st.booleans()):
            cursor = DataCursor(num_rows).restored(json.loads(json.dumps(cursor.state())))
    assert visits == list(range(len(visits)))
    passes = [walked[start : start + num_rows] for start in range(0, len(walked), num_rows)]
    assert all(len({*one_pass}) == len(one_pass) for one_pass in passes)


def test_changed_dataset_and_empty_dataset_are_refused():
    with pytest.raises(ValueError, match="has 11 rows, but the checkpoint was made with 10"):
        DataCursor(11).restored(DataCursor(10).state())
    with pytest.raises(ValueError, match="dataset is empty"):
        DataCursor(0)
