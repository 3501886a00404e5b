"""A sample that is scored early has the reward that it has otherwise, and nobody waits for samples that nobody
asks for.

pytest tests/rewards/test_background.py"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from megarl.config.schema import DataConfig
from megarl.rewards import RewardSample
from megarl.rewards.background import BackgroundPool
from megarl.rewards.pool import RewardPool
from megarl.runtime.abort import ABORT, Aborted

OWN = """
import os, time
def reward(data_source, solution_str, ground_truth, extra_info):
    folder = extra_info["folder"]
    open(f"{folder}/{solution_str}.{time.time_ns()}", "w").write(str(os.getpid()))
    if solution_str == "raises": raise KeyError("no such thing")
    if solution_str == "dies": os.kill(os.getpid(), 11)
    while solution_str.startswith("waits") and not os.path.exists(f"{folder}/go"): time.sleep(0.005)
    return float(len(solution_str))
"""


@pytest.fixture
def data(tmp_path) -> DataConfig:
    (tmp_path / "reward.py").write_text(OWN)
    (tmp_path / "calls").mkdir()
    return DataConfig(train_data=("x",), reward_function=f"{tmp_path}/reward.py:reward", reward_timeout_s=60)


def samples(folder: Path, *texts: str, first: int = 0) -> list[RewardSample]:
    extra = {"folder": str(folder / "calls")}
    return [RewardSample("x", text, None, extra, sample_id=first + i) for i, text in enumerate(texts)]


def calls(folder: Path) -> list[str]:
    """Return the texts that the function was called for, in the order of the calls."""
    found = [path.name.rpartition(".") for path in (folder / "calls").iterdir() if path.name != "go"]
    return [text for text, _, _ in sorted(found, key=lambda parts: int(parts[2]))]


def wait_until(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_rewards_are_those_of_a_pool_and_failures_too(data, tmp_path):
    asked = samples(tmp_path, "one", "raises", "three", "dies", "seven77")
    with RewardPool(data, 2) as plain:
        expected = plain.score(asked)
    assert [verdict.reward for verdict in expected] == [3.0, None, 5.0, None, 7.0]
    pool = BackgroundPool(data, 2)
    pool.begin(asked[:2])
    pool.begin(asked[2:4])
    wait_until(lambda: len(calls(tmp_path)) >= 5 + 4)  # nobody has asked for a reward yet
    assert pool.finish(asked[::-1]) == expected[::-1]  # the last sample was not begun
    assert sorted(calls(tmp_path)) == sorted(2 * [sample.solution_str for sample in asked])  # once each
    pool.close()


def test_an_evaluation_has_ids_of_its_own(data, tmp_path):
    pool = BackgroundPool(data, 1)
    trained, held_out = samples(tmp_path, "four"), samples(tmp_path, "fifth")
    pool.begin(trained)
    assert [verdict.reward for verdict in pool.score(held_out)] == [5.0]
    assert [verdict.reward for verdict in pool.finish(trained)] == [4.0]
    pool.close()


def test_samples_that_a_step_wants_go_first(data, tmp_path):
    pool = BackgroundPool(data, 1)
    first, early = samples(tmp_path, "waits"), samples(tmp_path, "a", "bb", "ccc", first=1)
    pool.begin(first)
    wait_until(lambda: calls(tmp_path) == ["waits"])
    for sample in early:
        pool.begin([sample])
    rewards: list[float] = []
    step = threading.Thread(target=lambda: rewards.extend(v.reward for v in pool.finish([early[2]])))
    step.start()
    wait_until(lambda: pool._urgent)
    (tmp_path / "calls" / "go").touch()
    step.join(30)
    assert rewards == [3.0]
    assert [verdict.reward for verdict in pool.finish([*first, *early[:2]])] == [5.0, 1.0, 2.0]
    assert calls(tmp_path) == ["waits", "ccc", "a", "bb"]
    pool.close()


def test_a_pool_that_closes_leaves_no_process_and_waits_for_no_function(data, tmp_path):
    pool, before = BackgroundPool(data, 1), time.monotonic()
    pool.begin(samples(tmp_path, "waits for ever"))
    wait_until(lambda: len(calls(tmp_path)) == 1)
    wait_until(lambda: [*(tmp_path / "calls").iterdir()][0].read_text())
    pid = int([*(tmp_path / "calls").iterdir()][0].read_text())
    pool.close()
    assert time.monotonic() - before < 20
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_aborted_job_waits_for_no_reward(data, tmp_path, monkeypatch):
    pool = BackgroundPool(data, 1)
    asked = samples(tmp_path, "waits")
    pool.begin(asked)
    monkeypatch.setattr(ABORT, "is_requested", True)
    with pytest.raises(Aborted):
        pool.finish(asked)
    pool.close()


def test_a_function_that_cannot_be_loaded_is_an_error_at_once(tmp_path):
    (tmp_path / "reward.py").write_text("raise OSError('no disk')\ndef reward(): ...")
    bad = DataConfig(train_data=("x",), reward_function=f"{tmp_path}/reward.py:reward")
    with pytest.raises(ValueError, match="no disk"):
        BackgroundPool(bad, 1)
