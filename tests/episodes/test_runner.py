"""Episodes between a scripted engine and real environment processes: turns, limits, failures, order.

pytest tests/episodes/test_runner.py"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megarl.config.environments import EnvSpec
from megarl.episodes.chat import Chat
from megarl.episodes.env_pool import EnvironmentPool
from megarl.episodes.environments import Reply
from megarl.episodes.episode import Episode, Limits
from megarl.episodes.runner import Answer, Turn, play
from megarl.runtime.abort import ABORT, Aborted
from tests.episodes.templates import tokenizer

ENVS = Path(__file__).with_name("envs.py")
NAME = "qwen2.5"
LIMITS = Limits(max_turns=10, max_response_length=8, max_context_length=1000)


class Scripted:
    """An engine that answers every turn with "two" and an end of turn, one request a step, newest first."""

    def __init__(self, num_tokens: int | None = None) -> None:
        self.num_tokens, self.turns, self.done = num_tokens, [], []
        self.asked: list[Turn] = []
        made = tokenizer(NAME)
        self.text = [*made.encode_response("two"), made.eos_token_id]

    def add(self, turns):
        self.turns += turns
        self.asked += turns

    def has_unfinished(self):
        return bool(self.turns)

    def step(self):
        turn = self.turns.pop()
        ids = (self.text * turn.max_tokens)[: self.num_tokens or len(self.text)][: turn.max_tokens]
        ends = ids[-1] == self.text[-1] and len(ids) < turn.max_tokens
        self.done.append(Answer(turn.index, ids, [-0.5] * len(ids), [7] * len(ids), not ends, turn.number))

    def take(self):
        done, self.done = self.done, []
        return done


def run(*whats: str, limits: Limits = LIMITS, engine: Scripted | None = None, timeout_s: float = 20.0, **how):
    engine, made = engine or Scripted(), tokenizer(NAME)
    episodes = [Episode({"what": what, **how}) for what in whats]
    with EnvironmentPool([EnvSpec(None, f"{ENVS}:Env")], timeout_s, 4) as environments:
        play(episodes, engine, environments, Chat(made, [made.eos_token_id]), limits)
        assert not environments._of_episode and not environments._lost  # every episode was ended
    return episodes, engine


def test_an_episode_is_its_turns_and_the_sum_of_its_rewards():
    episodes, engine = run(*(["plain"] * 6))
    for index, episode in enumerate(episodes):
        result = episode.result
        assert (result.reward, result.num_turns, result.finish_reason) == (0.75, 3, "stop")
        assert result.failure is result.cause is None and not episode.truncated
        assert result.prompt == [{"role": "user", "content": "start plain"}]
        assert [one["role"] for one in result.turns] == [
            "assistant",
            "tool",
            "assistant",
            "tool",
            "assistant",
        ]
        assert result.answers == ["two"] * 3 and result.turns[3]["content"] == "2 two"
        turns = [turn for turn in engine.asked if turn.index == index]
        for before, after in zip(turns, turns[1:], strict=False):
            assert after.prompt[: len(before.prompt + engine.text)] == [*before.prompt, *engine.text]
        num_sampled = 3 * len(engine.text)
        (branch,) = episode.branches
        assert branch.log_probs == [-0.5] * num_sampled
        assert branch.versions == [7] * num_sampled


def test_limits_end_an_episode_after_its_environment_has_seen_the_answer():
    (turns,), _ = run("plain", limits=Limits(2, 8, 1000))
    assert (turns.finish, turns.reward, turns.session.num_answers) == ("turns", 0.25, 2) and turns.truncated
    (whole,), engine = run("plain", limits=Limits(3, 8, 1000))
    assert (whole.finish, whole.truncated) == ("stop", False)
    lengths = [len(turn.prompt) for turn in engine.asked]
    # one token less than the last answer needs: the answer is cut, and the environment judges it
    (cut,), engine = run("plain", limits=Limits(10, 8, lengths[2] + 1))
    assert (cut.finish, cut.reward, cut.truncated) == ("stop", 0.75, True)
    assert engine.asked[2].max_tokens == 1
    (full,), engine = run("plain", limits=Limits(10, 8, lengths[2]))
    assert (full.finish, full.reward, full.truncated) == ("context", 0.25, True) and len(engine.asked) == 2
    (branch,) = full.branches
    assert len(full.session.turns[-1].prompt) >= lengths[2] > len(branch.prompt + branch.response)
    assert full.result.turns[-1]["role"] == "tool"  # what did not fit is logged
    (short,), engine = run("plain", limits=Limits(10, 1, 1000))
    assert (short.finish, short.truncated, short.result.num_turns) == ("stop", True, 3)


def test_a_first_prompt_without_room_for_an_answer_is_a_failure():
    (episode,), engine = run("plain", limits=Limits(10, 8, 5))
    assert (episode.cause, episode.reward, episode.finish) == ("refused", None, "env") and not engine.asked
    assert "--max-context-length (5) leaves no token" in episode.failure


@pytest.mark.parametrize(
    "what, cause, num_turns",
    [
        ("reset raises", "raised", 0),
        ("no messages", "malformed", 0),
        ("raise", "raised", 2),
        ("bad reward", "malformed", 2),
        ("hang", "timeout", 2),
    ],
)
def test_a_failed_episode_has_no_reward_and_the_others_go_on(what, cause, num_turns):
    episodes, _ = run("plain", what, "plain", timeout_s=2.0 if what == "hang" else 20.0)
    bad, good = episodes[1].result, [episodes[0].result, episodes[2].result]
    assert (bad.reward, bad.finish_reason, bad.cause, bad.num_turns) == (None, "env", cause, num_turns)
    assert [(one.reward, one.finish_reason) for one in good] == [(0.75, "stop")] * 2


def test_the_engine_goes_on_while_environments_are_slow():
    """No turn waits for another episode's environment: the fast ones end long before the slow one replies."""
    ends: list[tuple[float, int]] = []

    class Watching(Scripted):
        def take(self):
            done = super().take()
            ends.extend((time.monotonic(), answer.index) for answer in done)
            return done

    started = time.monotonic()
    run("slow", "plain", "plain", engine=Watching())
    last = {index: at - started for at, index in ends}
    assert last[1] < last[0] and last[2] < last[0] and last[0] >= 1.0


def test_an_abort_ends_the_wait_for_an_environment(monkeypatch):
    """The third call hangs for its deadline of 20 s; the abort is seen long before."""
    monkeypatch.setattr(ABORT, "is_requested", False)

    class Stopping(Scripted):
        def take(self):
            ABORT.is_requested = len(self.asked) == 2
            return super().take()

    started = time.monotonic()
    with pytest.raises(Aborted):
        run_until_abort(Stopping())
    assert time.monotonic() - started < 10


def run_until_abort(engine: Scripted) -> None:
    made = tokenizer(NAME)
    with EnvironmentPool([EnvSpec(None, f"{ENVS}:Env")], 20.0, 4) as environments:
        play([Episode({"what": "hang"})], engine, environments, Chat(made, [made.eos_token_id]), LIMITS)


class Arriving:
    """Environments whose replies arrive in given portions, which no process could be made to do."""

    def __init__(self, *portions: list[int]) -> None:
        self._portions, self._num = [*portions], 0

    def open(self, row):
        self._num += 1
        return self._num - 1

    def step(self, episode, text, sampled):
        self._portions.append([episode])

    def replies(self, timeout_s):
        first = self._portions.pop(0) if self._portions else []
        return [Reply(one, [{"role": "user", "content": "?"}]) for one in first]

    def end(self, episode): ...

    def refuse(self, reply, code, message, is_final=False):
        return False


def test_replies_that_arrive_while_others_become_turns_get_a_seat_in_the_same_step():
    """The engine has all three first turns before its first step, though the replies came one after
    another."""
    made = tokenizer(NAME)
    before_step: list[int] = []

    class Watched(Scripted):
        def step(self):
            before_step.append(len(self.turns))
            super().step()

    episodes, limits = [Episode({}) for _ in range(3)], Limits(1, 8, 1000)
    play(episodes, Watched(), Arriving([0], [1], [2]), Chat(made, [made.eos_token_id]), limits)
    assert before_step[0] == 3 and all(episode.finish == "turns" for episode in episodes)
