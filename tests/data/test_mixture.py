"""Rows of several files by weights: shares, passes, and a walk that resumes exactly.

pytest tests/data/test_mixture.py"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.cursor import DataCursor
from megarl.data.mixture import MixtureCursor
from megarl.data.prompts import PromptDataset

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(SIZES, st.data())
def test_shares_and_passes_hold_through_every_resume(sizes, data):
    """Of any first rows a file gives its share to less than the number of files; within a pass of a file each of its
    rows comes once; a cursor restored anywhere goes on as the one that was saved."""
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(sizes), max_size=len(sizes)))
    cursor, firsts = MixtureCursor(sizes, weights, seed=3), [sum(sizes[:k]) for k in range(len(sizes))]
    given_rows, visits = [[] for _ in sizes], []
    for count in data.draw(st.lists(st.integers(0, 12), max_size=12)):
        made = cursor.next_visits(count)
        visits += made
        for row in made.values():
            file = max(k for k, first in enumerate(firsts) if first <= row)
            given_rows[file].append(row - firsts[file])
            total = sum(map(len, given_rows))
            for k, weight in enumerate(weights):
                assert abs(len(given_rows[k]) - weight / sum(weights) * total) < max(len(sizes) - 1, 1)
        cursor = MixtureCursor(sizes, weights, seed=3).restored(json.loads(json.dumps(cursor.state())))
    assert visits == list(range(len(visits)))
    for size, rows in zip(sizes, given_rows, strict=True):
        passes = [rows[start : start + size] for start in range(0, len(rows), size)]
        assert all(len({*one_pass}) == len(one_pass) for one_pass in passes)


def test_the_order_of_the_example():
    assert MixtureCursor((100, 10), (3, 1), shuffle=False).next_rows(8) == [0, 1, 100, 2, 3, 4, 101, 5]


def test_files_are_shuffled_apart_and_anew():
    cursor = MixtureCursor((20, 20), (1, 1), seed=0)
    first, second = cursor.next_rows(40), cursor.next_rows(40)
    ours, theirs = [row for row in first if row < 20], [row - 20 for row in first if row >= 20]
    assert sorted(ours) == sorted(theirs) == [*range(20)] and ours != theirs
    assert first != second and first != MixtureCursor((20, 20), (1, 1), seed=1).next_rows(40)


def test_other_weights_count_from_the_resume():
    cursor = MixtureCursor((50, 50), (1, 1), seed=0)
    before = cursor.next_rows(20)
    resumed = MixtureCursor((50, 50), (3, 1), seed=0).restored(cursor.state())
    after = resumed.next_rows(8)
    assert sum(row < 50 for row in after) == 6 and not {*before} & {*after}


def test_other_files_are_refused():
    state, plain = MixtureCursor((5, 6), (1, 1)).state(), DataCursor(11).state()
    with pytest.raises(ValueError, match=r"the files have \[6, 5\] rows, and .* files of \[5, 6\] rows"):
        MixtureCursor((6, 5), (1, 1)).restored(state)
    with pytest.raises(ValueError, match="made with no --train-data-weights"):
        MixtureCursor((5, 6), (1, 1)).restored(plain)
    with pytest.raises(ValueError, match="made with --train-data-weights 1 1"):
        DataCursor(11).restored(state)
    with pytest.raises(ValueError, match="file 2 of --train-data has no rows"):
        MixtureCursor((5, 0), (1, 1))


def test_a_data_set_knows_the_sizes_of_its_files(tmp_path):
    for name, count in (("a", 3), ("b", 2)):
        row = json.dumps({"prompt": "x", "reward_model": {"ground_truth": "1"}})
        (tmp_path / f"{name}.jsonl").write_text(f"{row}\n" * count)
    assert PromptDataset.load([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]).file_sizes == (3, 2)
