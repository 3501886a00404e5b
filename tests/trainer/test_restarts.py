"""Where the next attempt of a job begins. `pytest tests/trainer/test_restarts.py`; tests/e2e/test_stopping.py
kills real jobs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import HashStore

from megarl.algorithms import REGISTRY
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.runtime.torchrun_agent import launcher_name
from megarl.trainer import restarts
from megarl.trainer.restarts import (
    attempt_under_torchrun,
    continued,
    note_launcher,
    of_this_attempt,
    where_it_goes_on,
)
from megarl.trainer.run_folder import lock_folder


def job(run: Path, *flags: str):
    given = [
        "--algorithm",
        "grpo",
        "--model",
        "m",
        "--train-data",
        "d.jsonl",
        "--train-iters",
        "9",
        "--save",
        str(run),
    ]
    return load_config([*given, *flags], REGISTRY)


@pytest.fixture
def run(tmp_path) -> Path:
    """An attempt that has recorded two steps."""
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    (run / "resolved.args").write_text("--save run")
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2)))
    (run / "rollouts" / "step_000001.jsonl").write_text("{}\n")
    return run


def test_it_goes_on_in_its_own_folder(run):
    config = continued(job(run))
    assert config.checkpoint.load == str(run) and config.run.save == str(run)
    assert where_it_goes_on(config) == "from the beginning: there is no checkpoint yet"
    for step in (2, 10):
        (run / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    assert where_it_goes_on(config) == f"from the checkpoint of step 10 ({run}/checkpoints/step_000010)"
    assert (run / "metrics.jsonl").read_text() and (
        run / "resolved.args"
    ).exists()  # what is cut is the new attempt's to say
    assert continued(config) == config


def test_a_run_that_began_at_anothers_checkpoint_begins_there_again(run, tmp_path):
    """It may not take --save for its own run as long as no checkpoint is there; then it must."""
    other = str(tmp_path / "other")
    config = job(run, "--load", other)
    assert continued(config) == config
    assert where_it_goes_on(config) == f"from the beginning ({other}): there is no checkpoint yet"
    assert [path.name for path in run.rglob("*")] == ["rollouts"]
    (run / "checkpoints" / "step_000004").mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    assert continued(config).checkpoint.load == str(run) and (run / "metrics.jsonl").exists()


def test_the_attempt_under_torchrun():
    """Ranks and the driver beside rank 0 are told differently."""
    rank, driver = {"TORCHELASTIC_RESTART_COUNT": "2"}, {"MEGARL_STORE_PREFIX": "megarl/some/attempt_3"}
    on_a_new_node = {"TORCHELASTIC_RESTART_COUNT": "0", "MEGARL_ATTEMPT": "1"}
    assert [attempt_under_torchrun(env) for env in ({}, rank, driver, on_a_new_node)] == [0, 2, 3, 1]


SAME = {"MEGARL_JOB_SECRET": "a" * 64, "TORCHELASTIC_RUN_ID": "megarl"}
"""What two starts of the documented command share: the secret is exported once, and the id is fixed."""


def agent(store: HashStore) -> dict[str, str]:
    """Return what torchrun_agent.py passes on to the ranks of a node."""
    return SAME | {"MEGARL_LAUNCHER": launcher_name(store, "megarl")}


def begin_run(run: Path, env: dict[str, str]) -> None:
    note_launcher(env)
    attempts = [{"number": 1, "launcher": env["MEGARL_LAUNCHER"]}]
    (run / "attempt.json").write_text(json.dumps({"attempts": attempts}))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_on_several_nodes_a_second_start_with_equal_secret_and_id_leaves_the_run_as_it_is(run, tmp_path):
    """Its first attempt was refused, and the next one may neither continue the run nor remove its records."""
    first, second = HashStore(), HashStore()  # that of a rendezvous ends with it
    begin_run(run, agent(first))
    before = contents(run)
    for config in (job(run), job(run, "--load", str(tmp_path / "third"))):
        refused = [agent(second) | {"MEGARL_ATTEMPT": number} for number in ("0", "1", "2")]
        for env in refused:
            note_launcher(env)
        assert [of_this_attempt(config, env) for env in refused] == [config] * 3
        assert contents(run) == before
    again = agent(first) | {"MEGARL_ATTEMPT": "1"}  # of a node that has taken the place of another
    note_launcher(again)
    assert of_this_attempt(job(run), again).checkpoint.load == str(run)


@pytest.mark.parametrize("wrapper", [(), ("bash", "-c", '"$@"; exit $?', "profiler")])
def test_plain_torchrun_is_told_apart_by_its_process(run, wrapper):
    """Two starts with equal secret and id, as two processes each of which starts rank 0 twice, directly or
    under another program as `nsys profile` is."""
    program = (
        "import os, subprocess, sys\n"
        "rank = 'import os; from megarl.trainer.restarts import note_launcher; '"
        "'note_launcher(); print(os.environ[\"MEGARL_LAUNCHER\"])'\n"
        "command = [*sys.argv[1:], sys.executable, '-P', '-c', rank]\n"
        "for _ in range(2): subprocess.run(command, env=os.environ | {'RANK': '0'}, check=True)\n"
    )
    command = [sys.executable, "-P", "-c", program, *wrapper]
    left_out = ("MEGARL_LAUNCHER", "RANK")
    env = {name: value for name, value in os.environ.items() if name not in left_out} | SAME
    starts = [subprocess.run(command, env=env, check=True, capture_output=True, text=True) for _ in range(2)]
    names = [start.stdout.splitlines() for start in starts]
    assert [len({*of_start}) for of_start in names] == [1, 1] and names[0][0] != names[1][0]
    (run / "attempt.json").write_text(json.dumps({"attempts": [{"number": 1, "launcher": names[0][0]}]}))
    first, second = (SAME | {"MEGARL_ATTEMPT": "1", "MEGARL_LAUNCHER": of_start[0]} for of_start in names)
    assert of_this_attempt(job(run), second) == job(run)
    assert of_this_attempt(job(run), first).checkpoint.load == str(run)


def test_a_run_of_nobody_is_not_continued(run):
    """attempt.json of an earlier version, or of a job without torchrun, names no launcher."""
    (run / "attempt.json").write_text(json.dumps({"attempts": [{"number": 1, "launcher": None}]}))
    assert of_this_attempt(job(run), {"MEGARL_ATTEMPT": "1"}) == job(run)


def test_records_of_a_job_that_still_runs_are_not_removed(run, tmp_path, monkeypatch):
    monkeypatch.setattr(restarts, "_DRIVER_ENDS_S", 0.0)
    before, lock = contents(run), lock_folder(run)
    with pytest.raises(ConfigError, match="another job is running there"):
        continued(job(run, "--load", str(tmp_path / "other")))
    assert contents(run) == before
    os.close(lock)
    continued(job(run, "--load", str(tmp_path / "other")))
    assert contents(run) == {}
