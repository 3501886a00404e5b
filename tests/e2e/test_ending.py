"""What a user sees and finds when a job ends, well or not. `pytest tests/e2e/test_ending.py`"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megarl.cli import COMMANDS, main
from tests.e2e.jobs import STARTING, train
from tests.e2e.test_stopping import rows

ANY_GATE = ("--gate-mean-abs", "inf", "--gate-max-abs", "inf")


def calls(run: Path) -> set[tuple[str, str]]:
    """Return (name, label) of the calls in timeline.json."""
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    return {(event["name"], event["args"]["label"]) for event in events if event["ph"] == "X"}


def test_a_learning_rate_that_destroys_the_model_is_warned_of_and_the_end_says_what_to_do(
    sums_data, tmp_path
):
    job = train(sums_data, tmp_path / "run", "--lr", "3", "--train-iters", "2", *ANY_GATE)
    assert job.returncode == 0, job.output
    lines = job.output.splitlines()
    (warning,) = [line for line in lines if " jumped from " in line]
    assert warning.startswith("step ") and "Try a lower --lr" in warning
    run = shlex.quote(str(job.folder))
    assert lines[-3:] == [
        f"A metric jumped at step {warning[5]} (see the warning): the model may be destroyed.",
        f"The model is in {run}/hf. To look at the run:",
        f"  megarl show {run}    megarl plot {run}    megarl chat --model {run}",
    ]
    assert {"show", "plot", "chat", "eval"} <= COMMANDS.keys()
    assert {("rollout.generate", "step 1"), ("actor.update", "step 2")} <= calls(job.folder)
    assert [path.name for path in job.folder.glob(".*")] == []


def test_a_gate_failure_is_one_message_without_a_traceback(sums_data, tmp_path, capsys):
    job = train(sums_data, tmp_path / "run", "--gate-max-abs", "1e-12")
    assert job.returncode == 1 and "Traceback" not in job.output, job.output
    lines = [line for line in job.output.splitlines() if not line.startswith(STARTING)]
    assert lines[0].startswith("[driver] failed at step 1: GateError: trainer and engine disagree on ")
    log = job.folder / "failure.log"
    show = f"megarl show {shlex.quote(str(job.folder))} --failed"
    assert lines[-2:] == [
        f"Read on in docs/debugging.md, section The gate. megarl's own traceback is in {log}.",
        f"To see what the model said in this step: {show}",
    ] and all(line.startswith("  ") for line in lines[1:-2])
    assert [line for line in job.output.splitlines() if line.startswith(STARTING)][0] == (
        "starting 2 ranks: each imports PyTorch, Megatron-Core and vLLM first"
    )
    assert "Traceback (most recent call last):" in log.read_text() and lines[0] in log.read_text()
    assert ("rollout.generate", "step 1") in calls(job.folder)
    assert {path.name for path in job.folder.iterdir()} == {
        "failure.log",
        "failed_step.jsonl",
        "timeline.json",
    }
    assert main(shlex.split(show)[1:]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "step 1, 16 samples, " in shown and "The step failed (" in shown and "GateError: trainer" in shown
    assert main(shlex.split(show)[1:-1]) == 2  # the run has no step
    assert "Add --failed." in capsys.readouterr().err


def test_samples_whose_reward_failed_can_be_seen(sums_data, tmp_path):
    """Also one beyond --num-rollouts-to-log: the first of each engine."""
    (tmp_path / "picky.py").write_text(
        "def reward(data_source, solution_str, ground_truth, extra_info):\n"
        "    if solution_str not in ('', ground_truth):\n"
        "        raise ValueError('cannot read this')\n"
        "    return 1.0\n"
    )
    rule = ("--reward-function", str(tmp_path / "picky.py:reward"), "--num-rollouts-to-log", "1")
    job = train(sums_data, tmp_path / "run", *rule)
    assert job.returncode == 1 and "RewardsFailed: 16 of 16 rewards have failed" in job.output, job.output
    rows = [json.loads(line) for line in (job.folder / "failed_step.jsonl").read_text().splitlines()]
    assert [row["sample_id"] for row in rows] == [0, 8]  # each of the two engines has answered two prompts
    for row in rows:
        assert (row["step"], row["reward"]) == (1, None) and "cannot read this" in row["failure"]
        assert row["error"].startswith("RewardsFailed: 16 of 16") and row["response"] and row["prompt"]


PATIENT = """
import os
def reward(data_source, solution_str, ground_truth, extra_info):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write("x")
    if os.path.getsize(os.environ["CALLS"]) > int(os.environ["MOST"]):
        raise ConnectionError("the judge is gone")
    return float(len(solution_str))
"""


@pytest.mark.timeout(300)
def test_a_judge_that_goes_away_leaves_the_last_completed_step(sums_data, tmp_path, monkeypatch):
    """And the run that goes on from it is the one that had a judge all the time."""
    (tmp_path / "patient.py").write_text(PATIENT)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("MOST", str(3 * 16))  # one or two steps, and the rows that are tried before
    flags = ("--reward-function", str(tmp_path / "patient.py:reward"), "--train-iters", "3")
    job = train(sums_data, tmp_path / "run", *flags)
    step = len(job.metrics)
    folder = tmp_path / "run" / "checkpoints" / f"step_{step:06d}"
    assert job.returncode == 1 and step in (1, 2) and folder.is_dir(), job.output
    assert f"[driver] failed at step {step + 1}: RewardsFailed: " in job.output
    assert f"\nStopped after step {step}: its checkpoint is {folder}\n" in job.output
    assert json.loads((job.folder / "failed_step.jsonl").read_text().splitlines()[0])["step"] == step + 1
    monkeypatch.setenv("MOST", "1000000")
    again = train(sums_data, tmp_path / "run", *flags, "--load", str(tmp_path / "run"))
    whole = train(sums_data, tmp_path / "whole", *flags)
    assert again.returncode == whole.returncode == 0, again.output
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
