"""Agents that lose connections, while the endpoint's event loop is blocked again and again and other processes use the
cores: every answer is sampled once, arrives, and is trained on once.

pytest tests/episodes/test_agent_load.py"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.episodes.agent_pool import AgentPool
from megarl.episodes.chat import Chat
from megarl.episodes.episode import Episode, Limits
from megarl.episodes.runner import play
from tests.episodes.templates import tokenizer
from tests.episodes.test_branch_fuzz import NAME, Random
from tests.launch import command_line

COMMAND = command_line("-S", Path(__file__).with_name("dropping_agent.py"))
BLOCKED_S = 0.5
LIMITS = Limits(max_turns=100, max_response_length=8, max_context_length=100_000, max_branches=8)


@contextlib.contextmanager
def blocked_again_and_again(agents: AgentPool) -> Iterator[list[float]]:
    """Let the endpoint's event loop stand still for half of the time. Yields when it began to."""
    times: list[float] = []
    stop = threading.Event()

    def block() -> None:
        while not stop.wait(2 * BLOCKED_S if times else 0.1):
            times.append(time.monotonic())
            agents.proxy._in_loop(time.sleep, BLOCKED_S)

    thread = threading.Thread(target=block)
    thread.start()
    try:
        yield times
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Let so many processes use the cores."""
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.parametrize(
    "count, num_turns, num_busy",
    [(4, 4, 0), pytest.param(60, 25, 4, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])],
)
def test_lost_connections_and_a_blocked_event_loop_lose_nothing(count, num_turns, num_busy, caplog):
    made, engine = tokenizer(NAME), Random()
    episodes = [Episode({"seed": seed, "num_turns": num_turns}) for seed in range(count)]
    with busy(num_busy), AgentPool(COMMAND, 800.0, min(count, 20), 100_000) as agents:
        with blocked_again_and_again(agents) as times:
            play(episodes, engine, agents, Chat(made, [made.eos_token_id]), LIMITS)
        assert not agents._asked and not agents._completions and not agents.proxy._conversations
    assert times and not caplog.records  # a lost connection is no error of the job's
    num_lost = 0
    for index, episode in enumerate(episodes):
        assert (episode.failure, episode.finish) == (None, "stop")
        num_lost += episode.reward
        (branch,), sampled = episode.branches, engine.sampled[index]
        assert len(sampled) == num_turns  # no attempt was answered anew
        holes = {at for start, end in branch.holes for at in range(start, end)}
        trained = [token for at, token in enumerate(branch.response) if at not in holes]
        assert trained == [token for number in sorted(sampled) for token in sampled[number][1]]
        assert branch.log_probs == [-float(token) for token in trained]
        answers = [one["content"] for one in branch.messages if one["role"] == "assistant"]
        told = [one["content"] for one in branch.messages if one["role"] == "tool"]
        assert answers == episode.session.answers
        assert told == [f"{turn} {zlib.crc32(text.encode())}" for turn, text in enumerate(answers[:-1])]
    print(f"{count * num_turns} answers, {num_lost:g} attempts lost, blocked {len(times)} times")
    assert num_lost > count
