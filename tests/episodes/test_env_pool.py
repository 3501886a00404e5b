"""Environments in processes: a bad one costs its episode, or those of its process, and no others.

pytest tests/episodes/test_env_pool.py"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from megarl.config.environments import EnvSpec
from megarl.config.schema import EpisodeConfig
from megarl.episodes.env_pool import EnvironmentPool, Reply
from megarl.episodes.probe import probe_environments

ENVS = Path(__file__).with_name("envs.py")


def pool(name: str = "Env", timeout_s: float = 20.0, per_process: int = 16) -> EnvironmentPool:
    return EnvironmentPool([EnvSpec(None, f"{ENVS}:{name}")], timeout_s, per_process)


def wait_for(environments: EnvironmentPool, count: int) -> dict[int, Reply]:
    """Return the next replies, one per episode."""
    found: dict[int, Reply] = {}
    deadline = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline, found
        for reply in environments.replies(0.2):
            assert reply.episode not in found
            found[reply.episode] = reply
    return found


def steps(environments: EnvironmentPool, episodes: list[int], text: str = "x") -> dict[int, Reply]:
    for episode in episodes:
        environments.step(episode, text)
    return wait_for(environments, len(episodes))


def test_episodes_of_one_process_do_not_meet():
    with pool() as environments:
        episodes = [environments.open({"what": f"plain {number}"}) for number in range(5)]
        first = wait_for(environments, 5)
        for number, episode in enumerate(episodes):
            assert first[episode].messages == [{"role": "user", "content": f"start plain {number}"}]
        assert len({id(process) for process in environments._of_episode.values()}) == 1
        second = steps(environments, episodes[:3], "é \ud800")  # a lone surrogate, as models write them
        assert {reply.cause for reply in second.values()} == {"malformed"}  # no JSON holds it
        replies = steps(environments, episodes[3:], "é 🙂")
        assert [(r.messages[0]["content"], r.reward, r.done) for r in replies.values()] == [
            ("1 é 🙂", 0.25, False)
        ] * 2
        assert [(r.reward, r.done) for r in steps(environments, episodes[3:]).values()] == [(None, False)] * 2
        last = steps(environments, episodes[3:])
        assert [(r.messages, r.reward, r.done) for r in last.values()] == [([], 0.5, True)] * 2


FAILURES = {
    "raise": (
        "raised",  # the traceback begins in the user's file
        r"""step raised KeyError: 'planted'\nTraceback \(most recent call last\):\n  File ".*/tests/episodes/envs\.py", """,
    ),
    "exit": ("raised", "step raised SystemExit: 3"),
    "die": ("died", "the process of the environment died of SIGKILL"),
    "hang": ("timeout", r"a call took longer than --env-timeout-s \(1.5\)"),
    "bad return": ("malformed", r"step returned 'done'; wanted \(messages, reward, done\)"),
    "bad reward": ("malformed", "step returned the reward nan; wanted a finite number, or None"),
    "no reply": ("malformed", "step returned no messages, and the model has to answer some"),
    "secret": ("raised", "step raised RuntimeError: secret None"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_failure_is_that_of_its_episode(what, monkeypatch):
    """Each episode here has a process of its own, so the other one goes on."""
    monkeypatch.setenv("MEGARL_JOB_SECRET", "do not tell")
    cause, why = FAILURES[what]
    with pool(timeout_s=1.5 if what == "hang" else 20.0, per_process=1) as environments:
        bad, good = environments.open({"what": what}), environments.open({"what": "plain"})
        assert not any(reply.failure for reply in wait_for(environments, 2).values())
        steps(environments, [bad, good])
        replies = steps(environments, [bad, good])
        assert replies[bad].cause == cause and replies[bad].reward is None
        assert re.search(why, replies[bad].failure), replies[bad].failure
        environments.end(bad)
        assert steps(environments, [good])[good].done
        environments.end(good)
        again = environments.open({"what": "plain"})
        assert wait_for(environments, 1)[again].failure is None


def test_a_death_takes_the_episodes_of_its_process_and_no_others():
    with pool(per_process=2) as environments:
        episodes = [environments.open({"what": what}) for what in ("die", "plain", "plain", "plain")]
        wait_for(environments, 4)
        steps(environments, episodes)
        environments.step(episodes[0], "x")
        (lost,) = wait_for(environments, 1).values()
        assert (lost.episode, lost.cause) == (episodes[0], "died")
        replies = steps(environments, episodes[1:])  # the first of them was waiting for the model
        assert [replies[episode].cause for episode in episodes[1:]] == ["died", None, None]


def test_a_hanging_call_leaves_the_others_of_its_process_alone():
    """The process ends when they have ended, and gets no more episodes."""
    with pool(timeout_s=1.5) as environments:
        bad, good = environments.open({"what": "hang"}), environments.open({"what": "plain"})
        wait_for(environments, 2)
        steps(environments, [bad, good])
        environments.step(bad, "x")
        (late,) = wait_for(environments, 1).values()
        assert (late.episode, late.cause) == (bad, "timeout")
        environments.end(bad)
        old = environments._of_episode[good]
        assert not steps(environments, [good])[good].failure
        new = environments.open({"what": "plain"})
        assert wait_for(environments, 1)[new].failure is None
        assert environments._of_episode[new] is not old
        assert steps(environments, [good])[good].done
        environments.end(good)
        assert old._process.returncode is not None and old not in environments._processes


@pytest.mark.parametrize("name", ["Meeting", "Env"])
def test_slow_calls_of_one_process_overlap(name):
    """No call returns before all twelve have begun."""
    with pool(name) as environments:
        episodes = [environments.open({"what": "meet"}) for _ in range(12)]
        wait_for(environments, 12)
        if name == "Env":
            steps(environments, episodes)
        assert not any(reply.failure for reply in steps(environments, episodes).values())


def test_a_row_has_the_environment_that_its_data_source_names():
    """Each environment has processes of its own."""
    specs = [EnvSpec("count", f"{ENVS}:Env"), EnvSpec("a/b", f"{ENVS}:Async")]
    with EnvironmentPool(specs, 20.0, 16) as environments:
        first = environments.open({"data_source": "a/b", "what": "plain"})
        second = environments.open({"data_source": "count", "what": "plain"})
        replies = wait_for(environments, 2)
        assert [replies[one].messages[0]["content"] for one in (first, second)] == ["start", "start plain"]
        assert len(environments._processes) == 2
        with pytest.raises(ValueError, match="no environment of --env is called 'other'"):
            environments.open({"data_source": "other"})
        assert len(environments._of_episode) == 2


def test_the_end_of_an_episode_is_told_and_no_reply_follows(tmp_path):
    path = tmp_path / "ended"
    with pool("Ended") as environments:
        episode = environments.open({"path": str(path)})
        wait_for(environments, 1)
        environments.end(episode)
        deadline = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < deadline and environments.replies(0.05) == []
    assert path.read_text() == "closed\n"


def test_an_episode_that_ends_before_it_is_made_is_closed_too(tmp_path):
    file, closed = tmp_path / "slow.py", tmp_path / "closed"
    file.write_text(
        "import pathlib, time\n"
        "class Env:\n"
        "    def __init__(self): time.sleep(0.5)\n"
        "    def reset(self, row): return [{'role': 'user', 'content': 'hi'}]\n"
        "    def step(self, text): return [], 0.0, True\n"
        f"    def close(self): pathlib.Path({str(closed)!r}).touch()\n"
    )
    with EnvironmentPool([EnvSpec(None, f"{file}:Env")], 20.0, 4) as environments:
        environments.load()
        environments.end(environments.open({}))
        deadline = time.monotonic() + 20
        while not closed.exists():
            assert not environments.replies(0.05) and time.monotonic() < deadline


def test_no_process_is_left():
    environments = pool(per_process=1)
    for _ in range(3):
        environments.open({"what": "plain"})
    wait_for(environments, 3)
    pids = [process._process.pid for process in environments._processes]
    environments.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


PROBED = {
    "fails": ("import nowhere_to_be_found\n", "Env", "fails: ModuleNotFoundError"),
    "no class": ("x = 1\n", "Env", "defines no class Env"),
    "no method": ("class Env:\n    def reset(self, row): ...\n", "Env", "Env has no method step"),
    "reset raises": (
        "class Env:\n    def reset(self, row): return row['nothing']\n    def step(self, text): ...\n",
        "Env",
        r"on row 0 \(from 0\) of --train-data: reset raised KeyError: 'nothing'",
    ),
    "wrong messages": (
        "class Env:\n    def reset(self, row): return 'go'\n    def step(self, text): ...\n",
        "Env",
        "reset returned 'go' .* as messages",
    ),
}


@pytest.mark.parametrize("what", PROBED)
def test_a_bad_environment_is_found_before_training(what, tmp_path):
    source, name, why = PROBED[what]
    path = tmp_path / "env.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=rf"(?s)--env \({path}:{name}\).*{why}"):
        probe_environments(EpisodeConfig(env=(f"{path}:{name}",)), {"--train-data": [{"prompt": []}]})


def test_a_good_environment_passes_the_probe():
    rows = {"--train-data": [{"what": "plain"}], "--eval-data": [{"what": "plain"}]}
    probe_environments(EpisodeConfig(env=(f"{ENVS}:Env",)), rows)
