"""SIGTERM at a job that trains: the last whole step is a checkpoint, and a run that goes on from it is the
one that was never stopped.

pytest tests/e2e/test_stopping.py             a killed rank and --max-restarts
pytest tests/e2e/test_stopping.py -m nightly     SIGTERM, other layouts and launchers"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.trainer.resume_command import with_flags
from tests.e2e.jobs import COMMON, STARTING, replace_flags, train
from tests.e2e.test_cli_jobs import MEASURED, processes, wait_until

HERE = Path(__file__).parent
STEP_S = 0.4  # of the slow engine: 6.4 s for the 16 tokens of a rollout


class SlowJob:
    """In the rollout of step 3 when this is made, with an engine whose ranks take each step together."""

    def __init__(self, data: Path, folder: Path, *flags: str):
        self.folder, self.mark = folder, f"MEGARL_TEST_JOB={folder.name}-{os.getpid()}"
        arguments = [
            *COMMON,
            "--model",
            str(data / "model"),
            "--train-data",
            str(data / "train.jsonl"),
            "--save",
            str(folder / "run"),
        ]
        self.arguments = arguments = replace_flags(arguments, ["--train-iters", "5", *flags])
        env = dict([*os.environ.items(), self.mark.split("=")], PYTHONSAFEPATH="1", PYTHONPATH=str(HERE))
        with open(folder / "out", "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slow_rollout", str(STEP_S), str(folder), *arguments],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                env=env,
                start_new_session=True,
            )
        try:
            wait_until(lambda: "step=2/" in self.output() or self.process.poll() is not None, 200)
            before = self.steps()
            wait_until(lambda: min(map(int.__sub__, self.steps(), before)) >= 3, 60)
        except BaseException:
            self.end()
            raise

    def output(self) -> str:
        return (self.folder / "out").read_text()

    def steps(self) -> list[int]:
        """Of the engine, that each rank has begun."""
        return [(self.folder / f"rank_{rank}").stat().st_size for rank in (0, 1)]

    def told(self) -> list[str]:
        return [line for line in self.output().splitlines() if not line.startswith((*STARTING, "step="))]

    def end(self) -> None:
        for pid in processes(self.mark):
            os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


def rows(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(MEASURED)}
        for line in lines
    ]


def stop(job: SlowJob, together: bool = True) -> None:
    """By a SIGTERM to its process group; in the middle of a rollout. together: the ranks take the engine's
    steps so."""
    begun = job.steps()
    os.killpg(job.process.pid, signal.SIGTERM)
    assert job.process.wait(40) == 143, job.output()
    wait_until(lambda: not processes(job.mark), 10)
    run = job.folder / "run"
    folder = run / "checkpoints" / "step_000002"
    told, head, command = job.told()
    assert told == f"[driver] stopped by SIGTERM after step 2: its checkpoint is {folder}"
    assert head == "To go on after step 2:" and command.startswith("  megarl train ")
    words = shlex.split(command)[4:]  # slow_rollout.py has two arguments of its own
    assert words == with_flags(job.arguments, {"load": str(run)})
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    assert {event["args"].get("label") for event in events} >= {"step 1", "step 2"}
    ended = job.steps()
    assert ended[0] == ended[1] or not together, ended  # the ranks left before the same one
    assert max(ended) - max(begun) <= 6, (begun, ended)  # of 16
    assert [row["step"] for row in rows(run)] == [1, 2]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000002"]


TP2 = ("--tensor-model-parallel-size", "2", "--rollout-tensor-parallel-size", "2")


@pytest.mark.timeout(300)
def test_sigterm_leaves_the_rollout_and_saves_the_last_whole_step(sums_data, tmp_path):
    """The processes are started anew. Those of tests' preloaded Python are killed with their resource trackers, and
    would leave the shared memory of vLLM's ranks to tests that look for it."""
    job = SlowJob(sums_data, tmp_path, *TP2)
    try:
        stop(job)
    finally:
        job.end()


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [TP2, ()], ids=["tp2", "dp2"])
def test_a_stopped_run_goes_on_bit_for_bit(sums_data, tmp_path, layout):
    """All metrics but times and memory, and the exported weights."""
    job = SlowJob(sums_data, tmp_path, *layout)
    try:
        stop(job, together=layout == TP2)
    finally:
        job.end()
    again = train(sums_data, tmp_path / "run", "--train-iters", "5", "--load", str(tmp_path / "run"), *layout)
    assert again.returncode == 0, again.output
    whole = train(sums_data, tmp_path / "whole", "--train-iters", "5", *layout)
    assert rows(tmp_path / "run") == rows(tmp_path / "whole") and len(rows(tmp_path / "run")) == 5
    weights = [(tmp_path / name / "hf" / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert weights[0] == weights[1] and whole.returncode == 0


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_job_in_one_process_stops_in_order_too(sums_data, tmp_path):
    """With --executor inline; SIGTERM comes again and again, until the process has ended."""
    run, flags = tmp_path / "run", ("--train-iters", "30", "--nproc-per-node", "1", "--executor", "inline")
    arguments = [
        *COMMON,
        "--model",
        str(sums_data / "model"),
        "--train-data",
        str(sums_data / "train.jsonl"),
        "--save",
        str(run),
    ]
    with open(tmp_path / "out", "w") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "megarl.cli", "train", *replace_flags(arguments, list(flags))],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            cwd=tmp_path,
        )
    try:
        wait_until(lambda: "step=2/" in (tmp_path / "out").read_text() or process.poll() is not None, 200)
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.005)
    finally:
        process.kill()
    told, _, command = (tmp_path / "out").read_text().splitlines()[-3:]
    stopped = re.fullmatch(
        r"\[driver\] stopped by SIGTERM after step (\d+): its checkpoint is "
        rf"{re.escape(str(run))}/checkpoints/"
        r"step_(\d+)",
        told,
    )
    assert process.returncode == 143 and stopped and int(stopped[1]) == int(stopped[2]) == len(rows(run)), (
        tmp_path / "out"
    ).read_text()
    assert shlex.split(command)[-2:] == ["--load", str(run)]
    again = train(sums_data, run, *flags, "--load", str(run))
    whole = train(sums_data, tmp_path / "whole", *flags)
    assert (again.returncode, whole.returncode) == (0, 0), again.output + whole.output
    assert rows(run) == rows(tmp_path / "whole") and len(rows(run)) == 30


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_an_evaluation_that_was_left_is_made_up_for(sums_data, tmp_path):
    flags = (
        "--eval-data",
        str(sums_data / "test.parquet"),
        "--eval-interval",
        "2",
        "--eval-num-prompts",
        "8",
    )
    job = SlowJob(sums_data, tmp_path, *flags)  # in the evaluation after step 2
    try:
        os.killpg(job.process.pid, signal.SIGTERM)
        assert job.process.wait(40) == 143, job.output()
    finally:
        job.end()
    assert [("eval/reward" in row) for row in rows(tmp_path / "run")] == [True, False, False]
    again = train(sums_data, tmp_path / "run", "--train-iters", "5", *flags, "--load", str(tmp_path / "run"))
    whole = train(sums_data, tmp_path / "whole", "--train-iters", "5", *flags)
    assert (again.returncode, whole.returncode) == (0, 0), again.output + whole.output
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    assert [("eval/reward" in row) for row in rows(tmp_path / "run")] == [
        True,
        False,
        True,
        False,
        True,
        True,
    ]


# ------------------------------------------------------------------ restarts


class KilledJob:
    """`megarl train` whose rank 1 is killed as soon as a step is over, and which starts again by itself."""

    def __init__(
        self,
        data: Path,
        folder: Path,
        after_step: int,
        *flags: str,
        launcher: tuple[str, ...] = ("megarl.cli", "train"),
    ):
        arguments = [
            *COMMON,
            "--model",
            str(data / "model"),
            "--train-data",
            str(data / "train.jsonl"),
            "--save",
            str(folder / "run"),
        ]
        mark = f"MEGARL_TEST_JOB={folder.name}-{os.getpid()}"
        command = [sys.executable, "-P", "-m", *launcher, *replace_flags(arguments, list(flags))]
        with open(folder / "out", "w") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                start_new_session=True,
                env=dict([*os.environ.items(), mark.split("=")], PYTHONSAFEPATH="1"),
            )
        try:
            wait_until(
                lambda: f"step={after_step}/" in (folder / "out").read_text() or process.poll() is not None,
                200,
            )
            (rank_1,) = [pid for pid in processes(mark) if is_rank(pid, 1)]
            os.kill(rank_1, signal.SIGKILL)
            self.returncode = process.wait(300)
            wait_until(lambda: not processes(mark), 10)
        finally:
            for pid in processes(mark):
                os.kill(pid, signal.SIGKILL)
        self.run, self.output = folder / "run", (folder / "out").read_text()


def is_rank(pid: int, rank: int) -> bool:
    """Not so for the processes that it has started."""
    try:
        folder = Path(f"/proc/{pid}")
        is_main = b"megarl.train" in (folder / "cmdline").read_bytes().split(b"\0") and os.getsid(pid) == pid
        return is_main and f"RANK={rank}".encode() in (folder / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended meanwhile
        return False


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_killed_rank_costs_the_steps_since_the_checkpoint_and_nothing_else(layout_job, sums_data, tmp_path):
    job = KilledJob(sums_data, tmp_path, 2, "--save-interval", "1", "--max-restarts", "1")
    assert job.returncode == 0, job.output
    usual = (*STARTING, "step=", "The model is in ", "  megarl ")
    told = [line for line in job.output.splitlines() if not line.startswith(usual)]
    assert told[0].startswith(
        "[rank 1: actor, rollout] was killed by SIGKILL. If nobody did that, the machine was out of "
        "memory (see dmesg)."
    )
    saved = r"\d"  # of step 1, or of step 2 if it was complete when the rank died
    where = f"{re.escape(str(job.run))}/checkpoints/step_00000{saved}"
    assert re.fullmatch(
        rf"\[driver\] restart 1 of 1, from the checkpoint of step {saved} \({where}\)\.", told[1]
    )
    assert re.match(rf"continues after step {saved}: {where}", told[2]) and len(told) == 3, told
    whole = layout_job("dp2_to_tp1")
    of_training = [
        {name: value for name, value in row.items() if not name.startswith("eval/")}
        for row in rows(whole.folder)
    ]
    assert rows(job.run) == [row for row in of_training if len(row) > 1] and len(rows(job.run)) == 3
    weights = [(folder / "hf" / "model.safetensors").read_bytes() for folder in (job.run, whole.folder)]
    assert weights[0] == weights[1]


TORCHRUN = (
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "--max-restarts",
    "1",
    "-m",
    "megarl.train",
)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", [("megarl.cli", "train"), TORCHRUN], ids=["own", "torchrun"])
def test_a_restart_is_the_same_run(sums_data, tmp_path, launcher):
    """Rank 1 dies in step 4 of 6, a checkpoint every other step: all metrics and the weights to the last
    bit."""
    flags = ("--train-iters", "6", "--save-interval", "2", *TP2)
    own = ("--max-restarts", "1") if launcher is not TORCHRUN else ()
    job = KilledJob(sums_data, tmp_path, 3, *flags, *own, launcher=launcher)
    assert job.returncode == 0, job.output
    assert "continues after step 2" in job.output
    whole = train(sums_data, tmp_path / "whole", *flags)
    assert rows(job.run) == rows(whole.folder) and len(rows(job.run)) == 6
    weights = [(folder / "hf" / "model.safetensors").read_bytes() for folder in (job.run, whole.folder)]
    assert weights[0] == weights[1]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_same_failure_uses_up_the_restarts(sums_data, tmp_path):
    """It cannot train: what it prints is told at every attempt, and that it is the same again."""
    job = train(sums_data, tmp_path / "run", "--gate-max-abs", "1e-12", "--max-restarts", "2", timeout=500)
    assert job.returncode == 1
    told = [line for line in job.output.splitlines() if line.startswith("[driver]")]
    failed = "[driver] failed at step 1: GateError: "
    beginning = "from the beginning: there is no checkpoint yet."
    assert [line.startswith(failed) for line in told] == [True, False, True, False, True]
    again = "It was the same failure as before, at the same step, and nothing was saved since."
    assert told[1::2] == [
        f"[driver] restart 1 of 2, {beginning}",
        f"[driver] restart 2 of 2, {beginning} {again}",
    ]
