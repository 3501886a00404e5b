"""Episodes in which two actors take turns, with scripted engines and real environment processes: whose turn it is,
what each sees, whose reward it is, and how an episode ends for both.

pytest tests/episodes/test_shared.py"""

from __future__ import annotations

import random

import pytest

from megarl.config.environments import EnvSpec
from megarl.config.schema import EpisodeConfig
from megarl.episodes.chat import Chat
from megarl.episodes.env_pool import EnvironmentPool
from megarl.episodes.episode import Episode, Limits
from megarl.episodes.probe import probe_environments
from megarl.episodes.runner import Answer, play, play_to_end
from megarl.episodes.shared import ActorEngines, Seat, SharedPlay
from tests.episodes.templates import tokenizer
from tests.episodes.test_runner import ENVS, LIMITS, NAME, Scripted
from tests.episodes.test_session import chat_of, sampled_ids

PAIR = EnvSpec(None, f"{ENVS}:Pair")
ACTORS = ("actor", "actor_2")


class Random(Scripted):
    """An engine whose answers are random ids, many of which no text would be encoded to."""

    def __init__(self, seed: int, name: str = NAME) -> None:
        super().__init__()
        self.rng, self.name = random.Random(seed), name
        self.answers: dict[int, list[list[int]]] = {}  # of each episode

    def step(self):
        turn = self.turns.pop(self.rng.randrange(len(self.turns)))
        ids = sampled_ids(self.rng, self.name)[: turn.max_tokens]
        self.answers.setdefault(turn.index, []).append(ids)
        log_probs = [-self.rng.random() for _ in ids]
        self.done.append(Answer(turn.index, ids, log_probs, [3] * len(ids), False, turn.number))


def run(*whats: str, limits=(LIMITS, LIMITS), engines=None, env: EnvSpec = PAIR, chats=None):
    engines = engines or (Scripted(), Scripted())
    made = tokenizer(NAME)
    chats = chats or [Chat(made, [made.eos_token_id])] * 2
    seats = {actor: Seat(chat, own) for actor, chat, own in zip(ACTORS, chats, limits, strict=True)}
    episodes = [Episode({"what": what}, others={"actor_2": Episode({"what": what})}) for what in whats]
    with EnvironmentPool([env], 20.0, 4) as environments:
        playing = SharedPlay(environments, seats)
        play_to_end(playing, episodes, ActorEngines(dict(zip(ACTORS, engines, strict=True))), environments)
        assert not environments._of_episode and not environments._lost  # every episode was ended
    return [one.seats for one in episodes], engines


def test_each_actor_has_its_turns_its_observations_and_its_rewards():
    found, engines = run(*(["plain"] * 3))
    for index, seats in enumerate(found):
        mine, other = (seats[actor].result for actor in ACTORS)
        assert [one["content"] for one in (*mine.prompt, *mine.turns)] == [
            *("start plain", "two", "2 actor_2 two", "two", "4 actor_2 two", "two"),
        ]
        assert [one["content"] for one in (*other.prompt, *other.turns)] == [
            *("1 actor two", "two", "3 actor two", "two"),
        ]
        # 1 and 3 for the answers of the first, 2 and 4 for those of the second, and 0.5 for both at the end
        assert (mine.reward, mine.turn_rewards) == (4.5, [1.0, 3.0, 0.5])
        assert (other.reward, other.turn_rewards) == (6.5, [2.0, 4.5])
        assert (mine.finish_reason, other.finish_reason) == ("stop", "stop")
        assert [len([t for t in engine.asked if t.index == index]) for engine in engines] == [3, 2]


def test_a_plain_reward_is_everyones_and_one_before_the_first_answer_counts():
    ((first, second),) = [[seats[actor].result for actor in ACTORS] for seats in run("shared")[0]]
    assert (first.reward, first.turn_rewards) == (0.125 + 3 + 0.5, [0.125, 3.0, 0.5])
    assert (second.reward, second.turn_rewards) == (0.125 + 2 + 4 + 0.5, [2.0, 4.5])


def test_the_environment_may_let_the_second_actor_begin():
    ((first, second),) = [[seats[actor].result for actor in ACTORS] for seats in run("second first")[0]]
    assert (first.num_turns, second.num_turns) == (2, 3)
    assert second.prompt == [{"role": "user", "content": "start second first"}]


@pytest.mark.parametrize("names", [(NAME, NAME), ("qwen3", "llama3.1")])
def test_the_trained_ids_of_each_actor_are_those_that_its_engine_sampled(names):
    """100 random episodes: every sampled id is trained on once, by the actor that sampled it, in its place."""
    engines = tuple(Random(seed, name) for seed, name in enumerate(names))
    limits = (Limits(10, 12, 4000), Limits(10, 9, 4000))
    found, _ = run(
        *(["plain"] * 100), engines=engines, limits=limits, chats=[chat_of(name) for name in names]
    )
    for index, seats in enumerate(found):
        for actor, engine, own in zip(ACTORS, engines, limits, strict=True):
            (branch,) = seats[actor].branches
            holes = {at for start, end in branch.holes for at in range(start, end)}
            trained = [one for at, one in enumerate(branch.response) if at not in holes]
            assert trained == [one for answer in engine.answers[index] for one in answer]
            assert len(branch.log_probs) == len(branch.versions) == len(trained)
            assert max(map(len, engine.answers[index])) <= own.max_response_length
            turns = sorted((t for t in engine.asked if t.index == index), key=lambda turn: turn.number)
            for before, answer, after in zip(turns, engine.answers[index], turns[1:]):
                assert after.prompt[: len(before.prompt) + len(answer)] == [*before.prompt, *answer]


def test_a_limit_of_one_actor_ends_the_episode_for_both():
    (seats,), _ = run("plain", limits=(LIMITS, Limits(1, 8, 1000)))
    assert [seats[actor].result.num_turns for actor in ACTORS] == [2, 1]
    assert [seats[actor].finish for actor in ACTORS] == ["turns"] * 2
    assert [seats[actor].result.reward for actor in ACTORS] == [4.0, 2.0]
    assert all(seats[actor].truncated for actor in ACTORS)
    _, engines = run("plain")
    lengths = [len(turn.prompt) for turn in engines[1].asked]
    (seats,), _ = run("plain", limits=(LIMITS, Limits(10, 8, lengths[1])))
    assert [seats[actor].finish for actor in ACTORS] == ["context"] * 2
    assert [seats[actor].result.num_turns for actor in ACTORS] == [2, 1]
    (seats,), _ = run("plain", limits=(LIMITS, Limits(10, 8, lengths[0])))
    assert {seats[actor].cause for actor in ACTORS} == {"refused"} and "actor_2" in seats["actor"].failure


def test_an_answer_is_cut_at_the_limit_of_its_actor():
    (seats,), engines = run("plain", limits=(LIMITS, Limits(10, 1, 1000)))
    assert {turn.max_tokens for turn in engines[1].asked} == {1}
    assert {turn.max_tokens for turn in engines[0].asked} == {8}
    assert not seats["actor"].truncated and seats["actor_2"].truncated


@pytest.mark.parametrize(
    "what, cause, why",
    [
        ("raise", "raised", "step raised KeyError: 'planted'"),
        (
            "unknown",
            "malformed",
            "the environment names 'actor_3', and the actors of its episodes are actor, actor_2",
        ),
        ("reward of nobody", "malformed", "the environment names 'actor_3'"),
        (
            "reward of no number",
            "malformed",
            "step returned the reward 'much'; wanted a finite number, or None",
        ),
        ("number as name", "malformed", "the environment's `next_actor` is 2; wanted a name, as 'actor_2'"),
    ],
)
def test_a_failure_is_one_of_both_actors_and_of_no_other_episode(what, cause, why):
    (bad, good), _ = run(what, "plain")
    for actor in ACTORS:
        result = bad[actor].result
        assert (result.reward, result.cause, result.finish_reason) == (None, cause, "env")
        assert why in result.failure
    assert [good[actor].result.reward for actor in ACTORS] == [4.5, 6.5]


def test_an_actor_that_was_not_asked_has_no_reward_and_the_other_has():
    (seats,), engines = run("ends at once")
    first, second = (seats[actor].result for actor in ACTORS)
    assert (first.reward, first.finish_reason, first.cause) == (0.25, "stop", None)
    assert (second.reward, second.finish_reason, second.cause) == (None, "stop", "silent")
    assert second.failure == "the episode has ended without an answer of actor_2"
    assert second.num_turns == 0 and not engines[1].asked


def test_an_environment_of_several_actors_is_refused_where_there_is_one():
    """In an episode, and before training."""
    made = tokenizer(NAME)
    for what in ("plain", "reward of nobody"):
        episode = Episode({"what": what})
        with EnvironmentPool([PAIR], 20.0, 4) as environments:
            play([episode], Scripted(), environments, Chat(made, [made.eos_token_id]), LIMITS)
        assert (episode.cause, episode.reward) == ("malformed", None)
        assert "names 'actor_2', and the actors of its episodes are actor." in episode.failure
        assert "--share-episodes" in episode.failure
    config, rows = EpisodeConfig(env=(PAIR.target,)), {"--train-data": [{"what": "second first"}]}
    with pytest.raises(ValueError, match="row 0 .from 0. of --train-data: the environment names 'actor_2'"):
        probe_environments(config, rows)
    probe_environments(config, rows, ACTORS)


def test_an_environment_that_knows_one_actor_may_name_its_reward():
    """The name of the only actor is no error."""
    made, episode = tokenizer(NAME), Episode({"what": "reward by name"})
    with EnvironmentPool([EnvSpec(None, f"{ENVS}:Named")], 20.0, 4) as environments:
        play([episode], Scripted(), environments, Chat(made, [made.eos_token_id]), LIMITS)
    assert (episode.reward, episode.turn_rewards, episode.failure) == (2.5, [2.5], None)
