"""What the turns of an episode draw by, on an engine whose tokens follow from the key and the prompt.

pytest tests/workers/test_episode_turns.py"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megarl.config.schema import EpisodeConfig
from megarl.episodes.runner import Turn
from megarl.rollout.draws import AnswerKeys
from megarl.rollout.engine import Engine
from megarl.workers.episodes import EpisodeSampler, Turns
from megarl.workers.answer import Answer
from tests.episodes.templates import tokenizer
from tests.episodes.test_runner import ENVS
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


def test_a_turn_that_a_stop_token_of_the_job_has_ended_gets_an_end_of_turn(tmp_path):
    made = tokenizer("qwen2.5")
    call, end = made.encode_response("</tool_call>")[0], made.eos_token_id
    job = replace(config(tmp_path, stop_token_ids=(call,)), episodes=EpisodeConfig(env=(f"{ENVS}:Env",)))
    sampler = EpisodeSampler(job, SimpleNamespace(eos_token_ids=(end,), vocab_size=500), made, None)
    before = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "two"}]
    after = {last: sampler.chat.suffix(before, before[:1], last) for last in (end, call)}
    assert after[call] == [end, *after[end]]
    sampler.close()
