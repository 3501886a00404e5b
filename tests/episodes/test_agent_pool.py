"""Episodes between a scripted engine and real agent processes over HTTP: turns, limits, failures, processes.

pytest tests/episodes/test_agent_pool.py"""

from __future__ import annotations

import select
import sys
import time
from pathlib import Path

import pytest

from megarl.episodes import agent_pool
from megarl.episodes.agent_pool import AgentPool, read_reward
from megarl.episodes.chat import Chat
from megarl.episodes.episode import Episode, Limits
from megarl.episodes.runner import Play, play
from megarl.runtime.signing import JOB_SECRET
from tests.e2e.test_cli_jobs import processes
from tests.episodes.templates import tokenizer
from tests.episodes.test_runner import NAME, Scripted
from tests.launch import command_line

LIMITS = Limits(max_turns=10, max_response_length=8, max_context_length=1000)
COMMAND = command_line("-S", Path(__file__).with_name("agents.py"))


def run(
    *rows: dict, limits: Limits = LIMITS, timeout_s: float = 30.0, num_processes: int = 4, engine=None, **how
):
    engine, made = engine or Scripted(), tokenizer(NAME)
    episodes = [Episode(row) for row in rows]
    with AgentPool(COMMAND, timeout_s, num_processes, 1000, **how) as agents:
        play(episodes, engine, agents, Chat(made, [made.eos_token_id]), limits)
        assert not agents._agents and not agents._waiting and not engine.turns
    return episodes, engine


def test_agents_play_episodes_and_their_failures_cost_only_themselves(monkeypatch):
    """More episodes than processes. The plain ones are unharmed; no process is left."""
    monkeypatch.setenv(JOB_SECRET, "s" * 40)
    mark = f"MEGARL_TEST_AGENTS={time.monotonic_ns()}"
    monkeypatch.setenv(*mark.split("="))
    whats = ("plain", "exit", "no reward", "silent", "secret", "child", "plain")
    episodes, engine = run(*({"what": what, "noise": 30_000} for what in whats), num_processes=3)
    plain, dead, wordless, silent, secret, child, last = (episode.result for episode in episodes)
    for one in (plain, last, child):
        assert (one.reward, one.num_turns, one.finish_reason) == (0.75, 3, "stop")
        assert one.answers == ["two"] * 3
    assert [message["role"] for message in plain.turns] == [
        *("assistant", "tool", "assistant", "tool", "assistant")
    ]
    assert plain.turn_rewards == [0.0, 0.0, 0.75]
    assert (dead.reward, dead.cause, dead.num_turns) == (None, "died", 1) and "exit code 3" in dead.failure
    assert (wordless.cause, wordless.num_turns) == ("malformed", 3) and "'good bye'" in wordless.failure
    assert (silent.cause, silent.num_turns) == ("malformed", 0)
    assert secret.reward == 0.0  # the job's secret is not in an agent's environment
    assert not processes(mark)
    turns = [turn for turn in engine.asked if turn.index == 0]
    for before, after in zip(turns, turns[1:], strict=False):
        assert after.prompt[: len(before.prompt + engine.text)] == [*before.prompt, *engine.text]


@pytest.mark.parametrize("through", ["pool", "play"])
def test_the_end_of_a_job_starts_no_agent_that_waits(through, monkeypatch):
    made, started, kind = tokenizer(NAME), [], agent_pool._Agent
    monkeypatch.setattr(agent_pool, "_Agent", lambda *how: started.append(how) or kind(*how))
    with AgentPool(COMMAND, 30.0, 2, 1000) as agents:
        playing = Play(agents, Chat(made, [made.eos_token_id]), LIMITS)
        for index in range(6):
            playing.open(index, Episode({"what": "hang"}))
        if through == "play":
            playing.close()
    assert len(started) == 2 and not agents._agents


def test_an_agent_may_branch_off_and_begin_other_conversations():
    """Each answer is trained on once, after what the agent has sent before it."""
    (episode,), engine = run({"what": "branches"}, limits=Limits(10, 8, 1000, max_branches=8))
    assert (episode.failure, episode.reward, episode.finish) == (None, 0.5, "stop")
    prompts = {turn.number: turn.prompt for turn in engine.asked}
    parents = [None if t.parent is None else t.parent.number for t in episode.session.turns]
    asked_twice = [number for number, prompt in prompts.items() if prompt == prompts[0]]
    assert (len(prompts), asked_twice) == (10, [0, 1, 4, 5])
    assert parents[:7] == [None, None, 1, 0, None, None, None]
    assert [parent for parent in parents[7:] if parent is not None] in ([7], [8])  # "aside" comes any time
    branches, result = episode.branches, episode.result
    assert len(branches) == result.num_branches == 7 and result.num_turns == 10
    trained = [branch.prompt for branch in branches]
    assert sum(len(branch.log_probs) for branch in branches) == 10 * len(engine.text)
    assert trained[:4] == [prompts[0]] * 4 and sum(bool(branch.holes) for branch in branches) == 3
    assert [one[-1]["content"] for one in result.further] == ["two"] * 6
    assert result.turns[-1]["content"] == "two" and result.prompt[0]["content"] == "start branches"


def test_beyond_max_branches_a_request_is_refused_and_the_agent_may_go_on():
    (episode,), engine = run({"what": "branches"}, limits=Limits(10, 8, 1000, max_branches=3))
    assert (episode.failure, episode.reward, len(engine.asked)) == (None, -1.0, 6)
    assert len(episode.branches) == 3 and not episode.truncated
    (single,), _ = run({"what": "branches"}, limits=LIMITS)
    assert (single.reward, single.result.num_turns) == (-1.0, 1)  # n = 2 is refused, and one answer is not


def test_an_agent_that_a_rule_judges_need_not_print_a_reward():
    (wordless, dead), _ = run({"what": "no reward"}, {"what": "exit"}, is_judged=True)
    result = wordless.result
    assert (result.reward, result.failure, result.finish_reason) == (0.0, None, "stop")
    assert (dead.result.reward, dead.result.cause) == (None, "died")


def test_a_late_agent_is_killed():
    (late, plain), _ = run({"what": "hang"}, {"what": "plain"}, timeout_s=4.0)
    assert (late.cause, late.reward, late.session.num_answers) == ("timeout", None, 1)
    assert "--agent-timeout-s (4)" in late.failure and plain.reward == 0.75


@pytest.mark.nightly
def test_the_time_in_which_the_engine_stands_still_does_not_count():
    """Three answers take 9 of the 6 seconds that an agent has. Its requests wait on open connections
    meanwhile."""
    made = tokenizer(NAME)
    for counts in (False, True):
        with AgentPool(COMMAND, 6.0, 4, 1000) as agents:

            class Standing(Scripted):
                def step(self):
                    time.sleep(3.0)
                    super().step()
                    agents.extend(0.0 if counts else 3.0)

            episode = Episode({"what": "plain"})
            play([episode], Standing(), agents, Chat(made, [made.eos_token_id]), LIMITS)
        assert (episode.cause, episode.reward) == (("timeout", None) if counts else (None, 0.75))


def test_at_a_limit_the_agent_is_refused_and_keeps_its_reward():
    (turns,), _ = run({"what": "endless"}, limits=Limits(2, 8, 1000))
    assert (turns.finish, turns.reward, turns.result.num_turns) == ("turns", 0.5, 2) and turns.truncated
    assert turns.result.turn_rewards == [0.0, 0.5]
    (context,), engine = run({"what": "endless"}, limits=Limits(10, 8, 60))
    assert context.finish == "context" and context.truncated and len(context.branches[0].response) < 60
    assert context.reward == 0.25 * context.result.num_turns
    (full,), engine = run({"what": "plain"}, limits=Limits(10, 8, 5))
    assert (full.cause, full.reward) == ("refused", None) and not engine.asked
    (short,), engine = run({"what": "plain", "how": {"max_tokens": 1}})
    assert short.truncated and {turn.max_tokens for turn in engine.asked} == {1}


@pytest.mark.parametrize(
    "output, wanted",
    [
        (b"1", 1.0),
        (b'x\n{"reward": -0.5, "why": "no"}\n\n', -0.5),
        (b"\xff\n0\r\n", 0.0),
        (b'{"reward": true}', 1.0),
        (b'{"reward": false}', 0.0),
        *((text, None) for text in (b"", b"true", b"nan", b"1e39", b'{"reward": "1"}', b"[" * 9999, b"ok")),
    ],
)
def test_the_reward_is_the_last_line(output, wanted):
    if wanted is None:
        with pytest.raises(ValueError, match="wanted a number"):
            read_reward(output)
    else:
        assert read_reward(output) == wanted


def test_a_closed_stdout_is_not_looked_at_again():
    """It is readable for ever, and a wait for the agent's end would not wait."""
    with AgentPool(COMMAND, 60.0, 1, 1000) as agents:
        agents.open({"what": "closed"})
        deadline = time.monotonic() + 60
        while not agents.replies(1.0):
            assert time.monotonic() < deadline
        agents.replies(0.0)  # the agent waits for its answer; all that it has printed is read
        (agent,) = agents._agents.values()
        assert not agents._wait(agent.descriptors, 0.0)


@pytest.mark.parametrize(
    "url, host",
    [("http://127.0.0.1:99/v1", "127.0.0.1"), ("http://[::1]:99/v1", "::1")],
    ids=["IPv4", "IPv6"],
)
def test_agents_reach_the_endpoint_without_a_proxy(url, host, monkeypatch):
    import httpx

    monkeypatch.setenv("NO_PROXY", "example.org")
    program = "import os, sys; sys.stdout.write(os.environ['NO_PROXY'] + ' ' + os.environ['no_proxy'])"
    agent = agent_pool._Agent([sys.executable, "-S", "-c", program], {}, url, "key", 60.0)
    try:
        assert select.select([agent._pid_descriptor], [], [], 60.0)[0] and agent.exit_code() == 0
        wanted = f"example.org,{host}"
        assert agent.output.decode() == f"{wanted} {wanted}"
    finally:
        agent.kill()
    monkeypatch.setenv("NO_PROXY", wanted)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with httpx.Client() as client:
        assert client._transport_for_url(httpx.URL(url)) is client._transport
