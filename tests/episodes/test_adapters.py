"""Environments of other libraries, against the real packages in virtual environments of their own.

MEGARL_TEST_LIBRARIES names a folder with a virtual environment per package, called as the package is:
    for name in reasoning-gym skyrl-gym openenv-core; do python -m venv L/$name && L/$name/bin/pip install
    $name; done MEGARL_TEST_LIBRARIES=L pytest tests/episodes/test_adapters.py -m nightly"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from megarl.config.environments import SCHEMES, EnvSpec
from megarl.config.schema import EpisodeConfig
from megarl.data.prompts import PromptDataset
from megarl.episodes.adapters import ADAPTERS, PACKAGES
from megarl.episodes.env_pool import EnvironmentPool
from megarl.episodes.probe import probe_environments
from tests.episodes.test_env_pool import wait_for

ROOT = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).with_name("openenv_server.py")


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Importing openenv takes nine seconds of a core, which on a busy machine are minutes."""
    monkeypatch.setattr("megarl.episodes.env_pool._START_S", 900.0)


def python_of(package: str) -> str:
    python = Path(os.environ.get("MEGARL_TEST_LIBRARIES", "/nowhere"), package, "bin", "python")
    if not python.exists():
        pytest.skip(f"{package} is not installed in MEGARL_TEST_LIBRARIES")
    return str(python)


def play(spec: EnvSpec, row: dict, *answers: str) -> list:
    """Return the first messages, and the replies to the answers."""
    with EnvironmentPool([spec], 120.0, 4) as pool:
        pool.load()  # imports of these libraries take long
        episode = pool.open(row)
        replies = [wait_for(pool, 1)[episode]]
        for answer in answers:
            pool.step(episode, answer)
            replies.append(wait_for(pool, 1)[episode])
        for reply in replies:
            assert reply.failure is None, reply.failure
        pool.end(episode)
    return [replies[0].messages, *((reply.messages, reply.reward, reply.done) for reply in replies[1:])]


def test_the_rules_know_every_adapter():
    assert {*ADAPTERS} == {*PACKAGES} and {*ADAPTERS} <= {*SCHEMES}


@pytest.mark.parametrize("scheme", ["reasoning-gym", "skyrl-gym", "openenv"])
def test_a_missing_library_is_named_before_training(scheme):
    config = EpisodeConfig(env=(f"{scheme}:http://127.0.0.1:9",))
    with pytest.raises(ValueError, match=f"cannot import {PACKAGES[scheme]} .*--env-python path/to/venv"):
        probe_environments(config, {"--train-data": [{"prompt": []}]})


@pytest.mark.nightly
@pytest.mark.parametrize("task, config", [("leg_counting", {"max_animals": 3}), ("chain_sum", {})])
def test_reasoning_gym_asks_and_judges(task, config, tmp_path):
    python, out = python_of("reasoning-gym"), tmp_path / "rows.jsonl"
    script = ROOT / "examples" / "reasoning_gym_rows.py"
    flags = ("--seed", "5", "--size", "8", "--config", json.dumps(config), "--system", "default")
    subprocess.run([python, script, task, out, *flags], check=True, timeout=120)
    rows = [prompt.columns for prompt in PromptDataset.load(out)]
    assert len(rows) == 8 and rows[3]["data_source"] == task
    spec, right = EnvSpec(None, f"reasoning-gym:{task}", python), rows[3]["reward_model"]["ground_truth"]
    first, *judged = play(spec, rows[3], f"I think <answer>{right}</answer>")
    assert first == rows[3]["prompt"] and judged == [([], 1.0, True)]
    assert play(spec, rows[3], right)[1] == ([], 1.0, True)  # an answer without tags
    assert play(spec, rows[3], "<answer>no</answer>")[1][1] < 0.1
    rows[3]["extra_info"]["seed"] = 6
    with pytest.raises(AssertionError, match="is not the question of the row"):
        play(spec, rows[3])
    bad = EpisodeConfig(env=("reasoning-gym:leg_count",), env_python=(python,))
    with pytest.raises(ValueError, match="has no .leg_count. among its .* Try leg_counting"):
        probe_environments(bad, {"--train-data": rows[:1]})


@pytest.mark.nightly
def test_skyrl_gym_plays_several_turns():
    python = python_of("skyrl-gym")
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "1+1 ?"}],
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"max_turns": 3},
        "index": 0,
    }
    spec = EnvSpec(None, "skyrl-gym:gsm8k_multi_turn", python)
    first, wrong, right = play(spec, row, "#### 3", "so #### 2")
    assert first == row["prompt"] and right == ([], 1.0, True)
    assert wrong[1:] == (pytest.approx(0.2 / 3), False) and "tentative" in wrong[0][0]["content"]
    bad = EpisodeConfig(env=("skyrl-gym:gsm9k",), env_python=(python,))
    with pytest.raises(ValueError, match="Try gsm8k"):
        probe_environments(bad, {"--train-data": [row]})


@pytest.mark.nightly
@pytest.mark.timeout(2000)
def test_an_openenv_server_is_played():
    python = python_of("openenv-core")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([python, SERVER, str(port)])
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 900
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1)
                break
            except OSError:
                assert time.monotonic() < deadline and server.poll() is None
                time.sleep(0.2)
        row = {"prompt": [{"role": "user", "content": "Count."}], "extra_info": {"reset": {"seed": 7}}}
        first, one, two = play(EnvSpec(None, f"openenv:{url}", python), row, "ab", "stop")
        assert first == [{"role": "user", "content": "Count.\n\nstart 7"}]
        assert one == ([{"role": "user", "content": "2"}], 0.5, False)
        assert two == ([], 1.0, True)
    finally:
        server.kill()
        server.wait()
