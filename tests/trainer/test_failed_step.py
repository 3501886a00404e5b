"""The samples of a failed step: written without ever hiding the error. `pytest tests/trainer/test_failed_step.py`"""

from __future__ import annotations

import io
import json
import os

import pytest

from megarl.config.hf_config import ModelShape
from megarl.flow import Flow
from megarl.loggers.console import Progress
from megarl.loggers.json_lines import FAILED_STEP, cut_after, rollout_files
from megarl.packing import Sample
from megarl.trainer import failed_step
from megarl.trainer.failed_step import how_to_see_samples, save_failed_step
from megarl.trainer.preflight import Inputs
from megarl.trainer.run_folder import Run
from megarl.trainer.scores import RewardsFailed
from megarl.trainer.state import TrainState
from megarl.trainer.step_batches import StepBatches
from tests.trainer.test_actor_state import config

ERROR = RewardsFailed("2 of 2 rewards have failed\nand more")


@pytest.fixture
def state(tmp_path):
    one = config(tmp_path)
    state = TrainState(one, {"": Inputs(ModelShape.load(one.model.model), range(7), None)})
    state.begin_step()
    return state


@pytest.fixture
def batches(state):
    """A step whose samples are scored; the reward of the second is missing."""
    batches = StepBatches(1, Flow(), state.actors)
    batches.first.samples = [Sample(0, 5, 2, group=0), Sample(1, 5, 3, group=0, truncated=True)]
    batches.first.rewards = {0: 0.5, 1: None}
    texts = {"row": 3, "prompt": "p", "response": "r"}
    batches.first.records["reward"] = {
        0: {"sample_id": 0, "reward": 0.5, **texts},
        1: {"sample_id": 1, "reward": None, "failure": "why", **texts},
    }
    return batches


@pytest.fixture
def run(tmp_path, state):
    from dataclasses import replace

    folder = tmp_path / "a run"
    one = replace(state.first.config, run=replace(state.first.config.run, save=str(folder), log_with=()))
    with Run(one, "--train-iters 1\n", Progress(1, io.StringIO())) as run:
        yield run


def shown(run: Run) -> str:
    return run.progress._stream.getvalue()


def test_the_samples_are_written_with_the_error_and_are_no_trained_step(run, batches, state):
    command = how_to_see_samples(run.folder)
    assert command() is None
    save_failed_step(run, batches, state, ERROR)
    rows = [json.loads(line) for line in (run.folder / FAILED_STEP).read_text().splitlines()]
    error = "RewardsFailed: 2 of 2 rewards have failed"
    assert [(row["step"], row["error"], row["reward"]) for row in rows] == [(1, error, 0.5), (1, error, None)]
    assert rows[1]["failure"] == "why" and rows[1]["finish_reason"] == "length"
    assert command() == f"megarl show '{run.folder}' --failed" and shown(run) == ""
    assert rollout_files(run.folder) == {}
    cut_after(run.folder, 0)  # a resume leaves it for the user
    assert (run.folder / FAILED_STEP).is_file()
    later = how_to_see_samples(run.folder)  # the next attempt
    assert later() is None
    save_failed_step(run, batches, state, ERROR)
    assert later() is not None and [path.name for path in run.folder.glob(".*")] == []


def test_nothing_is_written_of_another_step_or_without_texts(run, batches, state):
    batches.first.records.clear()
    save_failed_step(run, batches, state, ERROR)
    batches.step = 0
    save_failed_step(run, batches, state, ERROR)
    assert not (run.folder / FAILED_STEP).exists() and shown(run) == ""


def test_a_failure_to_write_is_a_line(run, batches, state):
    (run.folder / FAILED_STEP).mkdir()
    save_failed_step(run, batches, state, ERROR)
    assert shown(run).startswith(f"the samples of the failed step are lost: {run.folder / FAILED_STEP}: ")
    assert [path.name for path in run.folder.glob(".*")] == []


def test_a_folder_that_hangs_delays_the_message_by_seconds_only(run, batches, state, monkeypatch):
    monkeypatch.setattr(failed_step, "_WRITE_S", 0.3)
    pipe = run.folder / f".{FAILED_STEP}.new"  # opening it waits for a reader
    os.mkfifo(pipe)
    save_failed_step(run, batches, state, ERROR)  # returns, although nobody reads the pipe
    assert "not written within 0.3 s" in shown(run)
    os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
