"""Agents that branch their conversations at random, with mutated requests between: each is answered or
refused with a reason, nothing of another episode is seen, and each answer is trained on once.

pytest tests/episodes/test_branch_fuzz.py"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megarl.episodes.agent_pool import AgentPool
from megarl.episodes.chat import Chat
from megarl.episodes.episode import Episode, Limits
from megarl.episodes.runner import Answer, Turn, play
from tests.episodes.templates import tokenizer
from tests.launch import command_line

NAME = "qwen2.5"
COMMAND = command_line(Path(__file__).with_name("fuzz_agent.py"))
LIMITS = Limits(max_turns=100_000, max_response_length=8, max_context_length=600, max_branches=400)


class Random:
    """An engine that answers some of the waiting turns in each step, in any order, with random ids."""

    def __init__(self) -> None:
        self.rng, self.turns, self.done = random.Random(0), [], []
        self.sampled: dict[int, dict[int, tuple[list[int], list[int]]]] = {}

    def add(self, turns: list[Turn]) -> None:
        self.turns += turns

    def has_unfinished(self) -> bool:
        return bool(self.turns)

    def step(self) -> None:
        turn = self.turns.pop(self.rng.randrange(len(self.turns)))
        ids = [self.rng.randrange(3, 250) for _ in range(self.rng.randint(1, turn.max_tokens))]
        self.sampled.setdefault(turn.index, {})[turn.number] = turn.prompt, ids
        is_cut = len(ids) == turn.max_tokens
        self.done.append(
            Answer(turn.index, ids, [-float(i) for i in ids], [1] * len(ids), is_cut, turn.number)
        )

    def take(self) -> list[Answer]:
        done, self.done = self.done, []
        return done


@pytest.mark.parametrize(
    "count", [60, pytest.param(2500, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])]
)
def test_branching_agents_are_answered_or_refused_and_never_mixed(count):
    made, engine, marks = tokenizer(NAME), Random(), ["zebra", "quokka"]
    episodes = [
        Episode({"seed": seed, "count": count, "mark": mark, "others": [one for one in marks if one != mark]})
        for seed, mark in enumerate(marks)
    ]
    with AgentPool(COMMAND, 800.0, 2, 1000) as agents:
        play(episodes, engine, agents, Chat(made, [made.eos_token_id]), LIMITS)
        assert not agents._asked and not agents._completions and not agents.proxy._conversations
    for index, (episode, mark) in enumerate(zip(episodes, marks, strict=True)):
        assert (episode.failure, episode.reward) == (None, 1.0)
        (other,) = {*marks} - {mark}
        sampled = engine.sampled[index]
        for prompt, _ in sampled.values():
            text = made._tokenizer.decode(prompt, skip_special_tokens=False)
            assert other not in text
        # every sampled token is trained on once, behind the ids that the engine has seen
        branches = episode.branches
        assert 10 < len(branches) <= LIMITS.max_branches
        trained: list[tuple[int, ...]] = []
        for branch in branches:
            whole, holes = [*branch.prompt, *branch.response], {*()}
            for start, end in branch.holes:
                holes |= {*range(start, end)}
            own = [at for at in range(len(branch.response)) if at not in holes]
            assert branch.log_probs == [-float(branch.response[at]) for at in own]
            trained += [(*whole[: len(branch.prompt) + at + 1],) for at in own]
        wanted = [(*prompt, *ids[: n + 1]) for prompt, ids in sampled.values() for n in range(len(ids))]
        assert sorted(trained) == sorted(wanted)
