"""The calls of several actors for the episodes that they share: in any order, for the same prompts.

pytest tests/workers/test_shared_episodes.py"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megarl.config.environments import EnvSpec
from megarl.episodes.chat import Chat
from megarl.episodes.env_pool import EnvironmentPool
from megarl.rollout.draws import draw_key
from megarl.workers.episodes import EpisodeSampler
from megarl.workers.answer import Answer
from megarl.workers.shared_episodes import SharedEpisodes
from tests.episodes.templates import tokenizer
from tests.episodes.test_runner import ENVS, LIMITS, NAME

WHATS = ["plain", "ends at once", "raise", "plain"]


class Engine:
    """Answers each request with its key and its temperature, in two tokens and an end of turn."""

    def __init__(self) -> None:
        self.requests, self.outputs, self.keys = [], [], []

    def add(self, requests):
        self.requests += requests

    def step(self):
        request = self.requests.pop()
        self.keys.append(request.key)
        ids = [*tokenizer(NAME).encode_response(str(request.key % 97)), tokenizer(NAME).eos_token_id]
        ids = ids[: request.max_tokens]
        self.outputs.append(
            SimpleNamespace(
                id=request.id,
                token_ids=ids,
                log_probs=[-0.5] * len(ids),
                versions=[1] * len(ids),
                finish_reason="stop",
            )
        )

    def take(self):
        outputs, self.outputs = self.outputs, []
        return outputs


@pytest.fixture
def made():
    """The shared episodes of two actors, and their engines."""
    shared, engines = SharedEpisodes(), {}
    dataset = [SimpleNamespace(columns={"what": what}) for what in WHATS]
    for suffix in ("", "_2"):
        sampler, engine = EpisodeSampler.__new__(EpisodeSampler), Engine()
        sampler._engine = engines[suffix] = engine
        sampler.chat = Chat(tokenizer(NAME), [tokenizer(NAME).eos_token_id])
        sampler.limits = lambda purpose: LIMITS
        sampler.environments = EnvironmentPool([EnvSpec(None, f"{ENVS}:Pair")], 20.0, 4)

        def first_turns(purpose, visits, greedy, suffix=suffix):
            prompt, num = [2, 3, 4], 1 if greedy else 2
            asked = [(visit, row, index) for visit, row in visits for index in range(num)]
            keys = [draw_key(0, purpose + suffix, visit, index) for visit, _, index in asked]
            answers = [
                Answer(visit * num + index, row, visit, prompt, key)
                for (visit, row, index), key in zip(asked, keys, strict=True)
            ]
            return answers, {"temperature": 0.0 if greedy else 1.0}

        shared.join(suffix, sampler, first_turns, {"train": dataset, "eval": dataset})
    yield shared, engines
    for player in shared._players.values():
        player.sampler.close()


def told(samples) -> list[tuple]:
    return [
        (one.sample_id, one.group, one.prompt, one.response, one.holes, one.episode.reward) for one in samples
    ]


VISITS = [(7, 0), (8, 1), (9, 2), (11, 3)]


def test_whichever_actor_asks_first_the_episodes_are_the_same(made):
    shared, engines = made
    first, second = (shared.samples_of(suffix, "train", VISITS, False) for suffix in ("", "_2"))
    num_asked = [len(engine.keys) for engine in engines.values()]
    other, one = (shared.samples_of(suffix, "train", VISITS, False) for suffix in ("_2", ""))
    assert told(first) == told(one) and told(second) == told(other)
    assert [len(engine.keys) for engine in engines.values()] == [2 * num for num in num_asked]
    assert [sample.sample_id for sample in first] == [sample.sample_id for sample in second]
    assert [sample.group for sample in first] == [7, 7, 8, 8, 9, 9, 11, 11]
    assert [sample.episode.reward for sample in first] == [4.5, 4.5, 0.25, 0.25, None, None, 4.5, 4.5]
    assert [sample.episode.reward for sample in second] == [6.5, 6.5, None, None, None, None, 6.5, 6.5]
    silent = second[2]
    assert (silent.prompt, silent.num_sampled, silent.episode.cause) == ([2, 3, 4], 1, "silent")
    assert not {*engines[""].keys} & {*engines["_2"].keys}  # no draw of one actor is that of the other


def test_calls_for_other_prompts_than_those_that_were_played_are_refused(made):
    shared, _ = made
    shared.samples_of("", "train", VISITS, False)
    with pytest.raises(
        ValueError, match=r"rollout_2 is asked for samples of the rows \[0\] of the train data, .*were "
    ):
        shared.samples_of("_2", "train", VISITS[:1], False)
    shared.samples_of("", "eval", VISITS, False)
    with pytest.raises(
        ValueError, match="is asked for greedy samples of the rows .* played for samples of the rows"
    ):
        shared.samples_of("_2", "eval", VISITS, True)
    shared.samples_of("", "train", VISITS, False)
    shared.samples_of("", "train", VISITS[:2], False)  # sampled again, as a second trainer.rollout() does
    assert len(shared.samples_of("_2", "train", VISITS[:2], False)) == 4
