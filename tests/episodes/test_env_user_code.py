"""What an environment's and an agent's code may do: alarms, loops, processes, imports, and print at length.

The table is a contract about behaviour: it says nothing about the processes in which the code runs.

pytest tests/episodes/test_env_user_code.py"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from megarl.config.environments import EnvSpec
from megarl.episodes.agent_pool import AgentPool
from megarl.episodes.chat import Chat
from megarl.episodes.env_pool import EnvironmentPool
from megarl.episodes.episode import Episode
from megarl.episodes.runner import play
from megarl.files.printed import FIRST_BYTES, LAST_BYTES
from tests.episodes.templates import tokenizer
from tests.episodes.test_agent_pool import LIMITS
from tests.episodes.test_env_pool import steps, wait_for
from tests.episodes.test_runner import NAME, Scripted

HEAD = """
import asyncio, os, signal, sys, threading, time
def score(text): return float(len(text))
class Base:
    def reset(self, row):
        self.row = row
        return [{"role": "user", "content": "hi"}]
"""
ALARM = """
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        try: return [], score(text), True
        finally: signal.alarm(0)
"""
STEPS = {
    "an alarm": "def step(self, text):" + ALARM,
    "an alarm in a coroutine": "async def step(self, text):" + ALARM,
    "an alarm that rings": """def step(self, text):
        def ring(*_): raise TimeoutError
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try: time.sleep(600)
        except TimeoutError: return [], 1.0, True
        finally: signal.signal(signal.SIGALRM, before)
""",
    "a loop of its own": """def step(self, text):
        async def later(): return score(text)
        return [], asyncio.run(later()), True
""",
    "a plain method that returns a coroutine": """def step(self, text): return self._step(text)
    async def _step(self, text): return [], score(text), True
""",
    "a spawned pool": """def step(self, text):
        import multiprocessing
        with multiprocessing.get_context("spawn").Pool(1) as pool: return [], pool.apply(score, (text,)), True
""",
    "imports": """def step(self, text):
        from helper import value
        from scoring.sums import value as other
        return [], value * other * score(text), True
""",
    "exits in a coroutine": """async def step(self, text):
        if self.row["first"]: sys.exit(3)
        return [], 1.0, True
""",
}


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    (own := tmp_path / "own").mkdir()
    (tmp_path / "scoring").mkdir()
    for path in ("own/helper", "scoring/__init__", "scoring/sums"):
        (tmp_path / f"{path}.py").write_text("value = 1.0\n")
    monkeypatch.chdir(tmp_path)
    return own


@pytest.mark.parametrize("what", STEPS)
def test_the_code_of_an_environment_runs_as_in_a_script(what, project):
    """Several episodes share a process. What one raises is its own."""
    (project / "env.py").write_text(f"{HEAD}class Env(Base):\n    {STEPS[what]}")
    with EnvironmentPool([EnvSpec(None, "own/env.py:Env")], 60.0, 4) as pool:
        episodes = [pool.open({"first": not at}) for at in range(3)]
        wait_for(pool, 3)
        replies = steps(pool, episodes)
        told = [(replies[one].reward, replies[one].done) for one in episodes]
    if what == "exits in a coroutine":
        assert "step raised SystemExit: 3" in replies[episodes[0]].failure
        assert told[1:] == [(1.0, True)] * 2
    else:
        assert told == [(1.0, True)] * 3, [replies[one].failure for one in episodes]


def test_a_handler_keeps_later_calls_in_the_main_thread(project):
    """The first call sets a handler and takes its time; the others wait for it rather than fail in a thread."""
    (project / "env.py").write_text(
        f"{HEAD}class Env(Base):\n    def step(self, text):\n"
        "        signal.signal(signal.SIGALRM, signal.SIG_DFL)\n        time.sleep(0.4)\n        return [], 1.0, True\n"
    )
    with EnvironmentPool([EnvSpec(None, "own/env.py:Env")], 60.0, 4) as pool:
        episodes = [pool.open({}) for _ in range(4)]
        wait_for(pool, 4)
        assert [one.reward for one in steps(pool, episodes).values()] == [1.0] * 4


def assert_bounded(told: str, who: str) -> None:
    assert "begin" in told and "end of it" in told and f"[{who}] " in told and "are left out here" in told
    assert len(told) < FIRST_BYTES + LAST_BYTES + 500


PRINTS = "print('begin', 'x' * 3_000_000, 'end of it', file=sys.stderr, flush=True)"


def test_what_an_environment_prints_is_cut(project, capfd):
    (project / "env.py").write_text(
        f"{HEAD}class Env(Base):\n    def step(self, text):\n        {PRINTS}\n        return [], 1.0, True\n"
    )
    with EnvironmentPool([EnvSpec(None, "own/env.py:Env")], 60.0, 4) as pool:
        episode = pool.open({})
        wait_for(pool, 1)
        steps(pool, [episode])
        pool.end(episode)
    assert_bounded(capfd.readouterr().err, "environment")


def test_an_agent_imports_as_a_script_and_what_it_prints_is_cut(project, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as the ranks have it
    (project / "agent.py").write_text(
        "import json, os, sys, urllib.request, helper, scoring.sums\n"
        "body = json.dumps({'model': 'm', 'messages': [{'role': 'user', 'content': 'hi'}]}).encode()\n"
        "head = {'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        f"urllib.request.urlopen(urllib.request.Request(url, body, head)).read()\n{PRINTS}\nprint(0.5)\n"
    )
    episode, made = Episode({}), tokenizer(NAME)
    with AgentPool(shlex.join([sys.executable, "own/agent.py"]), 60.0, 1, 1000) as agents:
        play([episode], Scripted(), agents, Chat(made, [made.eos_token_id]), LIMITS)
    assert episode.reward == 0.5, episode.failure
    assert_bounded(capfd.readouterr().err, "agent")
