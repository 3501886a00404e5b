"""An environment in a Python of its own, without megarl and without what is installed beside it.

pytest tests/episodes/test_env_python.py"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.environments import EnvSpec
from megarl.config.schema import EpisodeConfig
from megarl.episodes.env_pool import EnvironmentPool
from megarl.episodes.probe import probe_environments
from tests.episodes.test_env_pool import wait_for

ENV = """
import importlib.util, os, sys

import only_here


class Env:
    def reset(self, row):
        found = [name for name in ("msgspec", "torch", "vllm", "aiohttp") if importlib.util.find_spec(name)]
        from megarl.tools import calculate
        said = [only_here.VALUE, sys.prefix, found, os.getcwd() in sys.path, calculate("1+2")]
        return [{"role": "user", "content": repr(said)}]

    async def step(self, text):
        return [], 0.5, True
"""


OLD_ENV = """
import sys


class Env:
    tools = [{"type": "function", "function": {"name": "add"}}]

    def reset(self, row):
        return [{"role": "user", "content": "%d.%d" % sys.version_info[:2]}]

    def step(self, text):
        return [], 0.5, True
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """The bin/python of an empty virtual environment, but for one module."""
    folder = tmp_path_factory.mktemp("other") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "only_here.py").write_text("VALUE = 7\n")
    return folder / "bin" / "python"


def test_the_environment_sees_its_own_packages_and_no_other(other, tmp_path, monkeypatch):
    file = tmp_path / "env.py"
    file.write_text(ENV)
    monkeypatch.chdir(tmp_path)  # is on the path
    with EnvironmentPool([EnvSpec(None, f"{file}:Env", str(other))], 60.0, 4) as pool:
        episode = pool.open({})
        reply = wait_for(pool, 1)[episode]
        assert reply.failure is None, reply.failure
        assert reply.messages[0]["content"] == repr([7, str(other.parents[1]), [], True, "3"])
        pool.step(episode, "x")
        assert wait_for(pool, 1)[episode].reward == 0.5


@pytest.fixture(scope="module")
def oldest() -> str:
    """A Python 3.9, the oldest that docs/agents.md names."""
    found = [shutil.which("python3.9"), *map(str, Path.home().glob(".pyenv/versions/3.9*/bin/python3.9"))]
    for python in filter(None, found):
        if subprocess.run([python, "--version"], capture_output=True).returncode == 0:
            return python
    pytest.skip("there is no Python 3.9 here")


def test_the_oldest_python_that_is_promised_runs_it(oldest, tmp_path):
    file = tmp_path / "env.py"
    file.write_text(OLD_ENV)
    with EnvironmentPool([EnvSpec(None, f"{file}:Env", oldest)], 60.0, 4) as pool:
        episode = pool.open({})
        reply = wait_for(pool, 1)[episode]
        assert reply.failure is None, reply.failure
        assert reply.messages[0]["content"] == "3.9" and reply.tools[0]["function"]["name"] == "add"
        pool.step(episode, "x")
        assert wait_for(pool, 1)[episode].reward == 0.5


def test_a_python_that_cannot_run_it_ends_the_job_before_training(other, tmp_path):
    file = tmp_path / "env.py"
    file.write_text(ENV.replace("only_here", "absent"))
    config = EpisodeConfig(env=(f"{file}:Env",), env_python=(str(other),))
    with pytest.raises(ValueError, match="No module named 'absent'"):
        probe_environments(config, {"--train-data": [{}]})
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho 'is too old' >&2\nexit 1\n")
    old.chmod(0o755)
    config = EpisodeConfig(env=(f"{file}:Env",), env_python=(str(old),))
    with pytest.raises(ValueError, match="the process of the environment ended with exit code 1"):
        probe_environments(config, {"--train-data": [{}]})
