"""Groups go to the engines with less load, in contiguous blocks. `pytest tests/trainer/test_routing.py`"""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.trainer.routing import route


@given(st.integers(0, 50), st.integers(1, 9), st.integers(0, 5))
def test_equal_loads_split_as_a_rollout_role_splits(num_groups, num_engines, load):
    """See RolloutRole.generate: replica r takes the visits from r * len(visits) // num_engines on."""
    expected = []
    for replica in range(num_engines):
        first, end = replica * num_groups // num_engines, (replica + 1) * num_groups // num_engines
        expected += [replica] * (end - first)
    assert route(num_groups, [load] * num_engines) == expected


@given(
    st.integers(0, 30),
    st.lists(st.none() | st.integers(0, 40), min_size=1).filter(lambda loads: {*loads} != {None}),
    st.integers(1, 5),
)
def test_loads_become_as_even_as_whole_groups_allow(num_groups, loads, load_of_group):
    routed = route(num_groups, loads, load_of_group)
    blocks = [engine for engine, _ in groupby(routed)]
    assert len(routed) == num_groups and blocks == sorted({*blocks})
    after = {e: load + load_of_group * routed.count(e) for e, load in enumerate(loads) if load is not None}
    assert {*blocks} <= after.keys()
    for engine in blocks:  # without one or two of its groups, no other engine would be much emptier
        assert after[engine] - 2 * load_of_group < min(after.values())


def test_a_busy_engine_gets_less_and_a_lost_one_nothing():
    assert route(6, [0, None, 2]) == [0, 0, 0, 0, 2, 2]
    assert route(3, [0, 100, 0]) == [0, 2, 2]
    assert route(4, [0, 8], load_of_group=4) == [0, 0, 0, 1]
    with pytest.raises(ValueError, match=r"loads \(\[None\]\) must have at least one engine"):
        route(1, [None])
