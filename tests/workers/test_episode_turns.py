"""What the turns of an episode draw by, on an engine whose tokens follow from the key and the prompt.

pytest tests/workers/test_episode_turns.py"""

from __future__ import annotations

import pytest

from megarl.episodes.runner import Turn
from megarl.rollout.draws import AnswerKeys
from megarl.rollout.engine import Engine
from megarl.workers.episodes import Turns
from megarl.workers.answer import Answer
from tests.workers.small_engine import MAX_RESPONSE, SmallEngine, config, whole_response

KEYS = (11, 12)


@pytest.fixture
def turns(tmp_path) -> Turns:
    engine = Engine(config(tmp_path), None, "")
    engine.inference = SmallEngine()
    firsts = [Answer(index, 0, 0, [5, 6], key) for index, key in enumerate(KEYS)]
    return Turns(engine, firsts, {"temperature": 1.0})


def answers(turns: Turns, *asked: tuple[int, list[int]]) -> list[list[int]]:
    """The tokens that the engine answers, in the order in which they were asked for."""
    turns.add([Turn(index, prompt, MAX_RESPONSE) for index, prompt in asked])
    found = {}
    while turns.has_unfinished():
        turns.step()
        found |= {answer.index: answer.token_ids for answer in turns.take()}
    return [found[index] for index, _ in asked]


def test_first_answers_draw_by_the_key_of_their_sample_and_later_ones_by_keys_of_their_own(turns):
    prompt, longer = [5, 6], [5, 6, 7, 8]
    assert answers(turns, (0, prompt), (1, prompt)) == [whole_response(key, prompt) for key in KEYS]
    later = AnswerKeys(KEYS[0])
    expected = [later.next(ids) for ids in (prompt, longer, longer)][1:]
    for key in expected:
        (tokens,) = answers(turns, (0, longer))
        assert tokens == whole_response(key, longer) != whole_response(KEYS[0], longer)
    assert whole_response(expected[0], longer) != whole_response(expected[1], longer)
