"""Where the next attempt of a job begins. `pytest tests/trainer/test_restarts.py`; tests/e2e/test_stopping.py
kills real jobs."""

import json
from pathlib import Path

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.trainer.restarts import (
    attempt_under_torchrun,
    continued,
    note_launcher,
    of_this_attempt,
    where_it_goes_on,
)


RUNS = (("ours", "0"), ("ours", "1"), ("others", "1"), ("ours", "0"))
"""torchrun's id of the launch, and number of the attempt."""


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


def test_only_an_attempt_of_the_same_torchrun_is_continued(run, tmp_path):
    """The run in --save may be another job's, for which the first attempt was refused. Its records stay."""
    config, before = job(run, "--load", str(tmp_path / "other")), (run / "metrics.jsonl").read_bytes()
    ours, again, others, first = (
        {"TORCHELASTIC_RUN_ID": name, "MEGARL_ATTEMPT": number} for name, number in RUNS
    )
    for env in (ours, again, others, first):
        note_launcher(env)
    for attempts in (
        [],
        [{"number": 1, "launcher": ours["MEGARL_LAUNCHER"]}, {"number": 2, "launcher": None}],
    ):
        (run / "attempt.json").write_text(json.dumps({"attempts": attempts}))
        assert [of_this_attempt(config, env) for env in (again, others, first)] == [config] * 3
        assert (run / "metrics.jsonl").read_bytes() == before
    (run / "attempt.json").write_text(
        json.dumps({"attempts": [{"number": 1, "launcher": ours["MEGARL_LAUNCHER"]}]})
    )
    (run / "checkpoints" / "step_000002").mkdir(parents=True)
    assert [of_this_attempt(config, env) for env in (others, first)] == [config] * 2
    assert of_this_attempt(config, again).checkpoint.load == str(run)


def test_on_several_nodes_the_secret_is_what_attempts_have_in_common():
    """A node may be replaced, and with it torchrun's process."""
    secret, other = ({"MEGARL_JOB_SECRET": name * 64, "TORCHELASTIC_RUN_ID": "megarl"} for name in "ab")
    alone = {"TORCHELASTIC_RUN_ID": "megarl"}
    for env in (secret, other, alone):
        note_launcher(env)
    launchers = {env["MEGARL_LAUNCHER"] for env in (secret, other, alone)}
    assert len(launchers) == 3 and not any("a" * 16 in launcher for launcher in launchers)
