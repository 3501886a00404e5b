"""A thousand episodes at once in a few processes: what one process costs when it is killed, and what is left.

pytest tests/episodes/test_env_load.py -m nightly"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megarl.config.environments import EnvSpec
from megarl.episodes.env_pool import EnvironmentPool, Reply

ENVS = Path(__file__).with_name("envs.py")
COUNT, PER_PROCESS = 1000, 125


def collect(pool: EnvironmentPool, count: int, timeout_s: float = 120) -> dict[int, Reply]:
    found: dict[int, Reply] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < count:
        assert time.monotonic() < deadline, len(found)
        for reply in pool.replies(0.2):
            assert reply.episode not in found
            found[reply.episode] = reply
    return found


@pytest.mark.nightly
def test_a_killed_process_costs_its_episodes_and_no_others_of_a_thousand():
    """Half of them wait in a call, the others for the model: the latter fail at their next call."""
    with EnvironmentPool([EnvSpec(None, f"{ENVS}:Async")], 100.0, PER_PROCESS) as pool:
        episodes = [pool.open({}) for _ in range(COUNT)]
        assert not any(reply.failure for reply in collect(pool, COUNT).values())
        assert len(pool._processes) == COUNT // PER_PROCESS
        for episode in episodes[::2]:
            pool.step(episode, "x")
        victim = pool._processes[3]
        lost = {*victim.episodes}
        os.kill(victim._process.pid, signal.SIGKILL)
        replies = collect(pool, COUNT // 2)
        for episode in episodes[1::2]:
            pool.step(episode, "x")
        replies |= collect(pool, COUNT // 2)
        assert {one for one, reply in replies.items() if reply.cause == "died"} == lost
        assert len(lost) == PER_PROCESS
        others = [reply for one, reply in replies.items() if one not in lost]
        assert all(reply.done and reply.reward == 1.0 for reply in others)
        for episode in episodes:
            pool.end(episode)
        again = pool.open({})
        assert collect(pool, 1)[again].failure is None


@pytest.mark.nightly
def test_a_thousand_waiting_episodes_end_at_once_and_leave_no_process():
    pool = EnvironmentPool([EnvSpec(None, f"{ENVS}:Env")], 600.0, PER_PROCESS)
    episodes = [pool.open({"what": "hang"}) for _ in range(COUNT)]
    collect(pool, COUNT)
    for _ in range(2):  # the second call hangs
        for episode in episodes:
            pool.step(episode, "x")
        if _ == 0:
            collect(pool, COUNT)
    pids = [process._process.pid for process in pool._processes]
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 10
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)
