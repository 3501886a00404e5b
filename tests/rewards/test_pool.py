"""Rewards that misbehave cost one reward each, and leave nothing behind.

pytest tests/rewards/test_pool.py"""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.config.schema import DataConfig
from megarl.rewards import RewardSample
from megarl.rewards.pool import RewardPool
from megarl.files.printed import FIRST_BYTES, LAST_BYTES, Printed

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


def test_a_sample_arrives_as_it_was(tmp_path):
    """Halves of characters in a response, and values of a parquet file that no JSON holds."""
    (tmp_path / "reward.py").write_text("def reward(**sample): raise ValueError(repr(sample))")
    extra_info = {"day": datetime.date(2026, 1, 2), "sum": 10**30, "pairs": [("a", 1)], "none": None}
    asked = RewardSample("x", "half \ud83d\0", None, extra_info)
    with RewardPool(DataConfig(train_data=("x",), reward_function=f"{tmp_path}/reward.py:reward"), 1) as pool:
        (verdict,) = pool.score([asked])
        assert verdict.digest == asked.digest
    sample = {
        "data_source": "x",
        "solution_str": "half \ud83d\0",
        "ground_truth": None,
        "extra_info": extra_info,
    }
    assert f"ValueError: {sample!r}" in verdict.failure


def test_halves_of_characters_in_an_error_are_written_out(tmp_path):
    (tmp_path / "reward.py").write_text("def reward(solution_str, **sample): raise ValueError(solution_str)")
    with RewardPool(DataConfig(train_data=("x",), reward_function=f"{tmp_path}/reward.py:reward"), 1) as pool:
        (verdict,) = pool.score(samples("half \ud83d"))
    assert "ValueError: half \\ud83d" in verdict.failure


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
        "import sys, time; from megarl.config.schema import DataConfig; from megarl.rewards.pool "
        "import RewardPool\n"
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


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("reward_function", "slow.py:reward", r"--reward-function \(slow.py:reward\)"),
        ("reward", "math", r"--reward \(math\)"),
        ("reward", None, r"--reward \(auto\)"),
    ],
)
def test_a_reward_that_does_not_load_in_time_is_named(monkeypatch, field, value, named):
    monkeypatch.setattr("megarl.rewards.pool.wait", lambda *_: [])
    data = DataConfig(train_data=("x",), **{field: value})
    with pytest.raises(ValueError, match=f"^{named} has not loaded within 120 s. .*--reward-timeout-s"):
        RewardPool(data, 1)


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


FORKS = """
import os, time
def reward(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "child first" and os.fork():  # the child returns with the pool's pipes
        time.sleep(0.3)
    if solution_str == "parent first" and os.fork() == 0:
        time.sleep(0.1)
    if solution_str == "child raises" and os.fork() == 0:
        raise KeyError("in the child")
    if solution_str == "child ends" and os.fork() == 0:
        os._exit(0)
    return float(extra_info["reward"])
"""


@pytest.mark.parametrize("num_workers", (1, 3))
def test_a_reward_that_forks_costs_its_own_reward_alone(tmp_path, num_workers):
    """Without numbers in the replies the child's reply is taken for that of the next sample, and so on to the
    last."""
    (tmp_path / "reward.py").write_text(FORKS)
    texts = [
        "child first",
        "",
        "",
        "parent first",
        "",
        "child ends",
        "",
        "child raises",
        "",
        "",
        "parent first",
    ]
    data = DataConfig(
        train_data=("x",), reward_function=f"{tmp_path}/reward.py:reward", reward_timeout_s=20.0
    )
    asked = [
        RewardSample("x", text, sample_id=100 + i, extra_info={"reward": i}) for i, text in enumerate(texts)
    ]
    with RewardPool(data, num_workers) as pool:
        for _ in range(3):
            verdicts = pool.score(asked)
            time.sleep(0.2)  # a child that is late for this call is in the way of the next
            assert [v.sample_id for v in verdicts] == [s.sample_id for s in asked]
            assert [v.digest for v in verdicts] == [s.digest for s in asked]
            for i, (text, verdict) in enumerate(zip(texts, verdicts, strict=True)):
                if text in ("", "child ends"):
                    assert verdict.reward == i and verdict.failure is None, (text, verdict)
                elif (
                    text != "child first" and verdict.reward is not None
                ):  # the child replied after the call had ended
                    assert verdict.reward == i
                else:
                    assert verdict.reward is None and f"sample {100 + i}, " in verdict.failure, (
                        text,
                        verdict,
                    )
                    assert "forked and returned in the child" in verdict.failure


def test_a_file_that_forks_while_it_is_loaded_is_refused(tmp_path):
    (tmp_path / "reward.py").write_text("import os, time\nif os.fork(): time.sleep(0.3)\n" + FORKS)
    with (
        pytest.raises(ValueError, match="forks while it is loaded"),
        RewardPool(DataConfig(train_data=("x",), reward_function=f"{tmp_path}/reward.py:reward"), 1) as pool,
    ):
        pool.score([RewardSample("x", "", extra_info={"reward": 1})] * 3)


LOUD = """
import os, sys
def reward(data_source, solution_str, ground_truth, extra_info):
    kind, _, number = solution_str.partition(" ")
    text = f"begin {number} " + "x" * int(number) + f" end {number}"
    if kind == "python": print(text, flush=True)
    if kind == "raw":
        for start in range(0, len(text), 1000): os.write(2, text[start:start + 1000].encode())
    if kind == "dies":
        os.write(1, text.encode())
        os._exit(1)
    return 1.0
"""


@pytest.mark.parametrize("kind", ("python", "raw", "dies"))
def test_what_a_reward_prints_is_cut(data, tmp_path, capfd, kind):
    """The beginning and the end of each call are passed on, the rest is counted: 7 MB become 8 kB."""
    (tmp_path / "reward.py").write_text(LOUD)
    data = dataclasses.replace(data, reward_timeout_s=60)
    sizes = [10, 7_000_000, 20, 500_000]
    with RewardPool(data, 1) as pool:
        capfd.readouterr()
        verdicts = pool.score(samples(*(f"{kind} {size}" for size in sizes)))
        told = capfd.readouterr().err  # all of it is there when the call returns
    assert [verdict.reward for verdict in verdicts] == [None if kind == "dies" else 1.0] * len(sizes)
    for size in sizes:
        assert f"begin {size} x" in told and f"x end {size}" in told
    counted = re.findall(r"(\d+) of (\d+) bytes that one call printed are left out here", told)
    assert [int(total) - int(left_out) for left_out, total in counted] == [FIRST_BYTES + LAST_BYTES] * 2
    assert len(told) < 2 * (FIRST_BYTES + LAST_BYTES) + 500


def test_the_lines_of_several_processes_are_whole(data, tmp_path, capfd):
    """`print` writes its arguments one by one if stdout is not buffered by the line."""
    (tmp_path / "reward.py").write_text(
        "def reward(data_source, solution_str, ground_truth, extra_info):\n"
        "    for number in range(20): print('scoring', solution_str, number, 'x' * 150)\n"
        "    return 1.0\n"
    )
    with RewardPool(dataclasses.replace(data, reward_timeout_s=60), 2) as pool:
        capfd.readouterr()
        pool.score(samples(*(str(number) for number in range(30))))
        told = capfd.readouterr().err.splitlines()
    assert sorted(told) == sorted(
        f"scoring {one} {line} {'x' * 150}" for one in range(30) for line in range(20)
    )


def test_a_line_that_comes_in_parts_is_written_when_it_is_whole():
    log, out = os.pipe()
    printed = Printed("reward", out)
    writer = os.dup(printed.writer)
    printed.follow()
    os.write(writer, b"first\nsec")
    assert os.read(log, 100) == b"first\n"
    os.write(out, b"another process\n")
    os.write(writer, b"ond\nlast")
    os.close(writer)
    printed.close()
    assert os.read(log, 100) == b"another process\nsecond\nlast\n"
    os.close(log)
    os.close(out)


def test_what_a_call_that_hangs_has_printed_is_told(data, tmp_path, capfd):
    (tmp_path / "reward.py").write_text(
        "import time\ndef reward(**sample):\n    print('x' * 9000 + 'reached here', flush=True)\n   "
        " time.sleep(1000)\n"
    )
    with RewardPool(data, 1) as pool:
        assert pool.score(samples("1"))[0].reward is None
    assert "reached here" in capfd.readouterr().err


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_answer_that_a_reward_names_arrives(tmp_path, num_workers):
    """Also half of a character, which JSON cannot hold."""
    file = tmp_path / "reward.py"
    file.write_text(
        "def reward(data_source, solution_str, ground_truth, extra_info):\n"
        "    named = {'score': 1.0, 'pred': solution_str + chr(0xD800)}\n"
        "    return named if solution_str else 0.5\n"
    )
    data = DataConfig(train_data=("none",), reward_function=f"{file}:reward")
    with RewardPool(data, num_workers) as pool:
        verdicts = pool.score(samples("17", ""))
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.5]
    assert verdicts[0].answer.startswith("17") and verdicts[1].answer is None
