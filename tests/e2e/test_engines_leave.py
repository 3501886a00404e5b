"""Whole jobs on three engines that lose some of them: every prompt is trained on once, and no token is too
old.

pytest tests/e2e/test_engines_leave.py -m nightly"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megarl import cli
from megarl.loggers.engine_states import read_states
from tests.e2e.jobs import COMMON, Job, replace_flags
from tests.e2e.test_cli_jobs import processes, wait_until
from tests.e2e.test_streaming import check_once, trained_visits
from tests.launch import preloaded_python

FLAGS = [
    *("--nproc-per-node", "4", "--actor-ranks", "0", "--rollout-ranks", "1-3"),
    *("--rollout-backend", "transformers", "--num-rollouts-to-log", "-1", "--staleness", "1"),
]


class EngineJob:
    """A running job, and the processes of its engines."""

    def __init__(self, data: Path, folder: Path, *flags: str, python: str | None = None):
        self.folder, self.mark = folder / "run", f"MEGARL_TEST_JOB={folder.name}-{os.getpid()}"
        self._log = folder / "out"
        paths = ["--model", str(data / "model"), "--train-data", str(data / "train.jsonl")]
        own = replace_flags(FLAGS, list(flags))
        arguments = replace_flags([*COMMON, *paths, "--save", str(self.folder)], own)
        with open(self._log, "w") as out:
            self.process = subprocess.Popen(
                [python or preloaded_python(), "-m", "megarl.cli", "train", *arguments],
                stdout=out,
                stderr=out,
                cwd=folder,
                env=dict([*os.environ.items(), self.mark.split("=")], PYTHONSAFEPATH="1"),
                start_new_session=True,
            )

    def output(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.output() or self.process.poll() is not None, 200)
        assert text in self.output(), self.output()

    def engines(self) -> list[int]:
        """Process ids of the engines."""
        running = processes(self.mark)
        return [pid for pid in running if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def end(self, code: int = 0) -> Job:
        assert self.process.wait(200) == code, self.output()
        return Job(code, self.output(), self.folder)


@contextmanager
def running(data: Path, folder: Path, *flags: str, **options: str) -> Iterator[EngineJob]:
    job = EngineJob(data, folder, *flags, **options)
    try:
        yield job
    finally:
        for pid in processes(job.mark):
            os.kill(pid, signal.SIGKILL)
        job.process.wait(10)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_job_loses_two_of_three_engines_and_gains_one(sums_data, tmp_path, capsys):
    evaluation = ("--eval-data", str(sums_data / "test.parquet"), "--eval-interval", "6")
    flags = ("--min-engines", "1", "--train-iters", "24", "--eval-num-prompts", "8", "--save-interval", "5")
    with running(sums_data, tmp_path, *flags, *evaluation) as job:
        job.wait_for("step=2/")
        first, second, _ = job.engines()
        os.kill(first, signal.SIGKILL)
        job.wait_for("has left")
        job.wait_for("step=6/")
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: job.output().count("has left") == 2, 60)
        assert sorted(one.state for one in read_states(job.folder)) == ["left", "left", "live"]
        assert cli.main(["engines", "add", str(job.folder)]) == 0
        job.wait_for("has the weights and gets prompts")
        ended = job.end()
    assert "is started in the next step" in capsys.readouterr().out
    assert sorted(one.state for one in read_states(job.folder)) == ["left", "live", "live"]
    check_once(trained_visits(job.folder), steps=24)
    assert [row["step"] for row in ended.steps] == [*range(1, 25)]
    assert max(row["staleness/max"] for row in ended.steps) == 1
    live = [row["engines/live"] for row in ended.steps]
    assert live[0] == 3 and live[-1] == 2 and min(live) == 1
    assert sum(row["engines/moved"] for row in ended.steps) >= 0
    evaluated = [row["step"] for row in ended.metrics if "eval/reward" in row]
    assert evaluated == [0, 6, 12, 18, 24]
    repeat = (*flags, *evaluation, "--replay", str(job.folder), "--save", str(tmp_path / "again"))
    with running(sums_data, tmp_path, *repeat) as again:
        assert again.process.wait(200) != 0
    assert "cannot repeat that run, because engine" in again.output()


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_an_engine_that_hangs_is_killed_and_its_prompts_go_to_the_others(sums_data, tmp_path):
    flags = ("--min-engines", "2", "--train-iters", "12")
    with running(sums_data, tmp_path, *flags, python=sys.executable) as job:  # no process in between to stop
        job.wait_for("step=1/")
        hanging = job.engines()[0]
        os.kill(hanging, signal.SIGSTOP)
        job.wait_for("did not answer within")
        assert hanging not in job.engines()
        ended = job.end()
    check_once(trained_visits(job.folder), steps=12)
    assert ended.steps[-1]["engines/live"] == 2 and max(row["staleness/max"] for row in ended.steps) == 1


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("needed", [None, "3"])
def test_the_job_ends_with_the_engine_that_it_needs(sums_data, tmp_path, needed):
    flags = () if needed is None else ("--min-engines", needed)
    with running(sums_data, tmp_path, *flags, "--train-iters", "200") as job:
        job.wait_for("step=1/")
        os.kill(job.engines()[0], signal.SIGKILL)
        job.end(code=1)
        wait_until(lambda: not processes(job.mark), 10)
    if needed is None:
        assert "with --min-engines 2 the others would go on" in job.output()
    else:
        assert "3 engines 2 are left, and --min-engines (3) needs more" in job.output()


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_open_episodes_of_a_lost_engine_go_on_in_another(sums_data, tmp_path):
    """Their environments are brought back there: none is lost, doubled or failed."""
    env = f"{Path(__file__).with_name('envs.py')}:Slow"
    flags = ("--env", env, "--max-turns", "4", "--max-context-length", "72", "--max-response-length", "8")
    flags += ("--nproc-per-node", "3", "--rollout-ranks", "1-2", "--min-engines", "1", "--train-iters", "6")
    with running(sums_data, tmp_path, *flags) as job:
        job.wait_for("step=2/")
        os.kill(job.engines()[0], signal.SIGKILL)
        job.wait_for("has left")
        ended = job.end()
    check_once(trained_visits(job.folder), steps=6)
    assert all(row["reward/failed"] == 0 and row["staleness/max"] <= 1 for row in ended.steps)
    assert sum(row["engines/moved"] for row in ended.steps) > 0


def rank_of(engine: int) -> bytes | None:
    """Return the rank whose process has started an engine's process."""
    status = Path(f"/proc/{engine}/status").read_text().splitlines()
    parent = next(line.split()[1] for line in status if line.startswith("PPid:"))
    variables = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
    return next((one.partition(b"=")[2] for one in variables if one.startswith(b"RANK=")), None)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_an_evaluation_whose_engine_ends_is_given_up_and_training_goes_on(sums_data, tmp_path):
    data = ("--eval-data", str(sums_data / "test.parquet"), "--eval-interval", "10")
    flags = ("--min-engines", "2", "--eval-engines", "1", "--train-iters", "10", "--eval-num-samples", "16")
    flags = (*flags, *data, "--rollout-max-num-seqs", "4", "--eval-num-prompts", "24")
    with running(sums_data, tmp_path, *flags, python=sys.executable) as job:
        job.wait_for("step=1/")
        (evaluating,) = [engine for engine in job.engines() if rank_of(engine) == b"3"]
        os.kill(evaluating, signal.SIGKILL)
        ended = job.end()
    assert "the evaluation of step 0 is given up: the engines with its weights have left" in ended.output
    assert [one.engine for one in read_states(job.folder) if one.state == "left"] == [2]
    check_once(trained_visits(job.folder), steps=10)
    assert max(row["staleness/max"] for row in ended.steps) == 1
    assert [row["step"] for row in ended.metrics if "eval/reward" in row] == [10]
