"""The other ways to run: again from resolved.args, in one process, evaluation, conversion, fine-tuning,
Ctrl-C.

pytest tests/e2e/test_cli_jobs.py"""

from __future__ import annotations

import json
import os
import shlex
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.launch import preloaded_python, without_warnings_of_machine
from tests.e2e.jobs import COMMON, STARTING, Job, replace_flags, snapshot, train

MEASURED = ("time/", "throughput/", "memory/")
"""Metrics that differ between two equal jobs."""


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [preloaded_python(), "-m", "megarl.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
        env=dict(os.environ, PYTHONSAFEPATH="1"),
    )


def learned(job: Job) -> list[dict]:
    return [
        {name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in job.metrics
    ]


# ------------------------------------------------------------------ the same job again


@pytest.mark.nightly
def test_resolved_arguments_run_the_job_again_bit_for_bit(layout_job, tmp_path):
    """On two ranks, with evaluation: every metric but times and memory, every sampled text and every byte of
    the export."""
    first = layout_job("dp2_to_tp1")
    done = run("train", f"@{first.folder / 'resolved.args'}", "--save", "again", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = Job(0, done.stdout, tmp_path / "again")
    assert len(learned(again)) == 4 and learned(again) == learned(first)
    for name in ("rollouts", "hf"):
        files = {path.name: path.read_bytes() for path in (first.folder / name).iterdir()}
        assert files == {path.name: path.read_bytes() for path in (again.folder / name).iterdir()} and files
    kept = (again.folder / "resolved.args").read_text()
    assert kept == (first.folder / "resolved.args").read_text().replace(str(first.folder), "again")


@pytest.mark.nightly
def test_one_process_does_what_a_driver_and_a_worker_do(layout_job, sums_data, tmp_path):
    """--executor inline against torchrun with one rank: all metrics, and the weights to the last bit."""
    inline = train(sums_data, tmp_path / "inline", "--nproc-per-node", "1", "--executor", "inline")
    assert inline.returncode == 0, inline.output
    assert learned(inline) == learned(layout_job("one"))
    weights = [(job.folder / "hf" / "model.safetensors").read_bytes() for job in (inline, layout_job("one"))]
    assert weights[0] == weights[1]


# ------------------------------------------------------------------ evaluation


def test_eval_of_a_run_answers_as_its_last_evaluation_did(layout_job, sums_data, tmp_path):
    """A model and data alone, and of three samples per row the first is that of a single one: bit for bit.

    One rank has the engine that two had; rounding decides over none of these tokens."""
    job = layout_job("dp2_to_tp1")
    before = snapshot(job.folder.parent)
    flags = "--eval-num-prompts 20 --eval-num-samples 3 --temperature 0.9 --max-response-length 16".split()
    rule = COMMON[COMMON.index("--reward-function") :][:2]
    data, out = sums_data / "test.parquet", ["--json", "--out", "samples.jsonl"]
    done = run("eval", "--model", job.folder, "--eval-data", data, *flags, *rule, *out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # progress beside --json goes to stderr: what starts, what is ready, what is answered
    told = re.sub(r"\(\d+\.\d s\)", "(s)", without_warnings_of_machine(done.stderr)).splitlines()
    assert told == [
        "starting 1 rank: each imports PyTorch, Megatron-Core and vLLM first",
        "starting: the model of actor is ready (s)",
        "starting: the engine of rollout is ready (s)",
        "starting: reward is ready (s)",
        "evaluating 20 prompts x 3 samples at temperature 0.9",
        "evaluating 20 prompts, greedy",
    ]
    result, rows = (
        json.loads(done.stdout),
        [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()],
    )
    last, scores = job.metrics[-1], result["all"]
    assert scores["reward_greedy"]["value"] == last["eval/reward_greedy"] > 0
    firsts = [row["reward"] for row in rows if row["name"] == "eval/reward" and row["sample_id"] % 3 == 0]
    assert len(firsts) == 20 and sum(firsts) / 20 == last["eval/reward"] > 0
    everything = [row["reward"] for row in rows if row["name"] == "eval/reward"]
    assert len(everything) == 60 and sum(everything) / 60 == scores["reward"]["value"]
    assert (result["rewards_are_right_or_wrong"], result["rows"]) == (False, 20)
    assert scores["best_at_3"]["value"] > scores["best_at_2"]["value"] > scores["best_at_1"]["value"]
    assert snapshot(job.folder.parent) == before
    assert run("show", "samples.jsonl", "--worst", 1, cwd=tmp_path).returncode == 0


@pytest.mark.nightly
def test_eval_answers_as_the_run_did_and_writes_nothing(layout_job, tmp_path):
    """A checkpoint's weights in another layout: both means are those of the run's last evaluation.

    A held-out row draws alike at each, and rounding decides over none of these tokens."""
    job = layout_job("dp2_to_tp1")
    before = snapshot(job.folder.parent)
    checkpoint = job.folder / "checkpoints" / "step_000003"
    done = run(
        "eval",
        "--model",
        checkpoint,
        "--rollout-tensor-parallel-size",
        2,
        "--json",
        cwd=tmp_path,
    )
    assert done.returncode == 0 and re.match("exporting .*step_000003/actor, .*\n", done.stderr)
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert (result["model"], result["rows"]) == (str(checkpoint), 20)
    assert result["all"]["reward_greedy"]["value"] == job.metrics[-1]["eval/reward_greedy"] > 0
    assert result["all"]["reward"]["value"] == job.metrics[-1]["eval/reward"] > 0
    assert snapshot(job.folder.parent) == before and not any(tmp_path.iterdir())


# ------------------------------------------------------------------ conversion


def test_convert_there_and_back_is_bit_equal(sums_data, tmp_path):
    """Through Megatron; the other directions are in tests/checkpoint."""
    done = run(
        "convert",
        "--model",
        sums_data / "model",
        "--save",
        "out",
        "--tensor-model-parallel-size",
        2,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    equal, forward = done.stdout.splitlines()
    assert equal == f"25 tensors, equal to {sums_data / 'model'} in torch.float32: out"
    gap = re.fullmatch(
        r"log-probs of \d+ tokens by Megatron and by transformers differ by up to (\S+)", forward
    )
    # rounding of two fp32 models of two layers, of log-probs of about 1: 2^-23 for each of a few operations
    assert float(gap[1]) < 1e-5
    before, after = (
        load_file(folder / "model.safetensors") for folder in (sums_data / "model", tmp_path / "out")
    )
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)
    config = json.loads((sums_data / "model" / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in (sums_data / "model").iterdir()
    }


def test_convert_refuses_at_once(sums_data, tmp_path):
    """Everything at once, before torch is imported; what --save names stays as it is."""
    model = tmp_path / "model"
    shutil.copytree(sums_data / "model", model, ignore=shutil.ignore_patterns("*.safetensors"))
    before = snapshot(tmp_path)
    sizes = ("--tensor-model-parallel-size", 8, "--pipeline-model-parallel-size", 3)
    done = run("convert", "--model", model, "--save", model, *sizes, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"--save ({model}): exists and is not empty. Try --save {model}-2.",
        f"--model ({model}): holds no *.safetensors. Give a folder with weights, or --load.",
        "--tensor-model-parallel-size (8): must divide the model's attention heads (4). Try 2 or 4.",
        "--pipeline-model-parallel-size (3): must divide the model's layers (2). Try 1 or 2.",
    ]
    assert snapshot(tmp_path) == before


# ------------------------------------------------------------------ fine-tuning


def test_fine_tuning_stops_at_the_loss_and_exports(sums_data, tmp_path):
    """Two ranks and micro-batches so small that one of them has fewer, so some are empty."""
    flags = (
        "--algorithm",
        "sft",
        "--train-data",
        str(sums_data / "sft_worked.jsonl"),
        "--max-response-length",
        "48",
        "--train-iters",
        "60",
        "--max-tokens-per-micro-batch",
        "96",
        "--lr",
        "4e-3",
        "--exit-loss",
        "2.5",
        "--temperature",
        "1",
    )
    job = train(sums_data, tmp_path / "sft", *flags)
    assert job.returncode == 0, job.output
    losses = [row["policy/loss"] for row in job.metrics]
    assert 5 < losses[0] < 6.5  # log(283) = 5.6: the untrained model knows nothing
    assert losses[-1] < 2.5 and all(loss >= 2.5 for loss in losses[:-1]) and len(losses) < 60
    start, weights = (
        load_file(folder / "model.safetensors") for folder in (sums_data / "model", job.folder / "hf")
    )
    assert all((weights[name] - start[name]).abs().max() > 0 for name in start)


# ------------------------------------------------------------------ Ctrl-C


@pytest.mark.nightly
def test_ctrl_c_ends_a_training_job_with_one_line_and_no_orphans(sums_data, tmp_path):
    """With real engines, which bring signal handlers and shared memory of their own."""
    job = [
        *COMMON,
        "--model",
        str(sums_data / "model"),
        "--train-data",
        str(sums_data / "train.jsonl"),
        "--save",
        "run",
    ]
    flags = replace_flags(job, ["--train-iters", "100000", "--rollout-tensor-parallel-size", "2"])
    mark = f"MEGARL_TEST_JOB={tmp_path.name}-{os.getpid()}"
    with open(tmp_path / "out", "w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "megarl.cli", "train", *flags],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            cwd=tmp_path,
            env=dict([*os.environ.items(), mark.split("=")], PYTHONSAFEPATH="1"),
            start_new_session=True,
        )
    try:
        wait_until(lambda: "step=2/" in (tmp_path / "out").read_text() or process.poll() is not None, 180)
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        assert process.wait(20) == 130, (tmp_path / "out").read_text()
        wait_until(lambda: not processes(mark), 10)
    finally:
        for pid in processes(mark):
            os.kill(pid, signal.SIGKILL)
    told = [
        line
        for line in (tmp_path / "out").read_text().splitlines()
        if not line.startswith((*STARTING, "step="))
    ]
    assert told[0].startswith("[driver] interrupted at step "), told
    assert told[1:] == [
        "There is no checkpoint yet (--save-interval writes them). To start anew:",
        f"  {shlex.join(['megarl', 'train', *flags, '--load', 'run'])}",
    ]
    assert json.loads((tmp_path / "run" / "timeline.json").read_text())["traceEvents"]
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, len(steps) + 1)) and steps  # every row that was written is whole


def wait_until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def processes(mark: str) -> list[int]:
    """Running processes with this variable in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            running = b"State:\tZ" not in (entry / "status").read_bytes()
            if running and mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # ended meanwhile, or not ours
            continue
    return found
