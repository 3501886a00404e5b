"""The keys of an episode's answers: `AnswerKeys` in megarl/rollout/draws.py.

pytest tests/rollout/test_draws.py"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.draws import AnswerKeys, draw_key

KEY = draw_key(7, "train", 3, 1)
IDS = st.lists(st.integers(0, 200_000), max_size=20)


@given(st.lists(IDS, min_size=1, max_size=8))
def test_the_first_answer_has_the_key_of_the_episode_and_no_two_answers_share_a_key(prefixes):
    keys = AnswerKeys(KEY)
    found = [keys.next(prefix) for prefix in prefixes]
    assert found[0] == KEY == AnswerKeys(KEY).next(prefixes[0])
    assert len({*found}) == len(found) and all(0 <= key < 1 << 63 for key in found)


def test_a_later_key_depends_on_the_ids_before_it_and_on_the_answers_to_these_alone():
    first, other = AnswerKeys(KEY), AnswerKeys(KEY)
    a = [first.next(ids) for ids in ([1], [1, 2], [1, 3], [1, 2])]
    b = [other.next(ids) for ids in ([1], [1, 3], [1, 2], [1, 2])]
    assert (a[1], a[2], a[3]) == (b[2], b[1], b[3])  # another order of arrival, the same keys
    assert AnswerKeys(KEY + 1).next([1]) == KEY + 1
    elsewhere = AnswerKeys(KEY + 1)
    assert elsewhere.next([1]) and elsewhere.next([1, 2]) != a[1]


def test_keys_are_the_same_in_every_version():
    """A stored run can be repeated only if the hash stays what it is."""
    keys = AnswerKeys(1)
    assert [keys.next(ids) for ids in ([5], [5, 300], [5, 300])] == [
        1,
        1925035505218723497,
        861793269956881530,
    ]
