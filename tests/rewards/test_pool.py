"""Rewards that misbehave cost one reward each, and leave nothing behind.

pytest tests/rewards/test_pool.py"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.config.schema import DataConfig
from megarl.rewards import RewardSample
from megarl.rewards.pool import RewardPool

OWN = """
import os, subprocess, sys, time
def reward(data_source, solution_str, ground_truth, extra_info):
    print("printed by the reward")
    if solution_str == "raises": raise KeyError("no such thing")
    if solution_str == "nan": return float("nan")
    if solution_str == "text": return "1.0"
    if solution_str == "exits": os._exit(3)
    if solution_str == "crashes": os.kill(os.getpid(), 11)
    if solution_str == "hangs": time.sleep(1000)
    if solution_str == "hog": return float(len(bytearray(400 << 20)))
    if solution_str == "reads": return float(len(sys.stdin.read()))
    if solution_str == "leaves a child":
        with open(extra_info["pid_file"], "w") as file: file.write(str(subprocess.Popen(["sleep", "1000"]).pid))
        time.sleep(1000)
    return float(solution_str) + (os.getpid() if ground_truth == "pid" else 0)
"""
FAILURES = {
    "raises": r"reward \(sample 1, .*raised KeyError: 'no such thing'\nTraceback",
    "nan": r"returned nan \(float\); wanted a finite number",
    "text": r"returned '1\.0' \(str\); wanted a finite number",
    "exits": r"reward.py:reward \(sample 1, .* ended its process with exit code 3",
    "crashes": "died of SIGSEGV",
    "hangs": r"took longer than --reward-timeout-s \(0\.5\) and was killed",
    "hog": "raised MemoryError",
}


@pytest.fixture
def data(tmp_path) -> DataConfig:
    (tmp_path / "reward.py").write_text(OWN)
    return DataConfig(
        train_data=("x",),
        reward_function=f"{tmp_path}/reward.py:reward",
        reward_timeout_s=0.5,
        reward_memory_limit_bytes=2**28,
    )


def samples(*texts: str, **columns) -> list[RewardSample]:
    return [RewardSample("x", text, sample_id=i, **columns) for i, text in enumerate(texts)]


@pytest.mark.parametrize("num_workers", (1, 2))
def test_a_reward_that_fails_costs_one_reward(data, num_workers):
    texts = [text for failure in FAILURES for text in ("2.5", failure)] + ["3", "reads"]
    with RewardPool(data, num_workers) as pool:
        verdicts = pool.score(samples(*texts))
    assert [v.reward for v in verdicts] == [2.5, None] * len(FAILURES) + [3.0, 0.0]
    for number, (name, pattern) in enumerate(FAILURES.items()):
        failure = verdicts[2 * number + 1].failure
        assert_matches(pattern.replace("sample 1", f"sample {2 * number + 1}"), failure)
        assert f"solution_str '{name}'" in failure
    assert [v.failure for v in verdicts if v.reward is not None] == [None] * (len(FAILURES) + 2)


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){pattern}"):
        raise ValueError(text)


def test_the_work_is_spread_and_processes_are_kept(data):
    with RewardPool(data, 2) as pool:
        first, second = (
            {v.reward for v in pool.score(samples(*["0"] * 40, ground_truth="pid"))} for _ in range(2)
        )
        assert first == second == {float(w.process.pid) for w in pool._workers} and len(first) == 2
        assert pool.score([]) == []


def test_what_a_killed_reward_has_started_dies_too(data, tmp_path):
    pid_file = tmp_path / "pid"
    with RewardPool(data, 1) as pool:
        (verdict,) = pool.score(samples("leaves a child", extra_info={"pid_file": str(pid_file)}))
    assert verdict.reward is None and not is_running(int(pid_file.read_text()))


def is_running(pid: int) -> bool:
    for _ in range(50):  # it has been sent SIGKILL; whoever adopted it must still reap it
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.1)
    return True


def test_nothing_is_left_when_the_rank_is_killed(data, tmp_path):
    program = (
        "import sys, time; from megarl.config.schema import DataConfig; from megarl.rewards.pool import RewardPool\n"
        "pool = RewardPool(DataConfig(train_data=('x',), reward_function=sys.argv[1]), 2)\n"
        "print(*(w.process.pid for w in pool._workers), flush=True); time.sleep(1000)"
    )
    rank = subprocess.Popen(
        [sys.executable, "-P", "-c", program, data.reward_function], stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in rank.stdout.readline().split()]
    assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    rank.kill()
    rank.communicate()
    assert not any(map(is_running, pids))


def test_a_file_that_cannot_be_used_is_refused_by_the_pool(tmp_path):
    for text, words in (
        ("def reward(:", "SyntaxError"),
        (
            "import os; os._exit(4)",
            "the process that loads the reward function ended its process with exit code 4",
        ),
        ("other = 1", "defines no reward"),
    ):
        (tmp_path / "bad.py").write_text(text)
        with pytest.raises(ValueError, match=words):
            RewardPool(DataConfig(train_data=("x",), reward_function=f"{tmp_path}/bad.py:reward"), 2)


def test_in_the_process_itself_for_pdb(data):
    with RewardPool(data, 0) as pool:
        good, bad = pool.score(samples("0", "raises", ground_truth="pid"))
    assert good.reward == os.getpid() and "raised KeyError" in bad.failure


def test_closing_ends_the_processes(data):
    pool = RewardPool(data, 2)
    pids = [worker.process.pid for worker in pool._workers]
    pool.close()
    pool.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
