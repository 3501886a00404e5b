"""tools/launch/slurm.sh under a real SLURM of two nodes: it trains, and goes on after a time limit and after
another job has taken its nodes.

    pytest tests/nodes/test_slurm.py -m nightly

Each case takes some minutes: SLURM counts time limits in minutes."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.jobs import COMMON, Job, replace_flags, train
from tests.e2e.test_resume import check_equal
from tests.nodes.namespaces import Nodes
from tests.nodes.slurm_cluster import Slurm, environment, why_not

ROOT = Path(__file__).resolve().parents[2]
REASON = why_not()
LIMIT_S = 600.0
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


def submit(slurm: Slurm, run: Path, steps: int, *options: str) -> int:
    """Submit a job of `steps` steps on two nodes, and return its number. It prints to <folder>/job.out."""
    data = slurm.nodes.folder / "data"
    files = ("--model", str(data / "model"), "--train-data", str(data / "train.jsonl"))
    arguments = replace_flags([*COMMON, *files], ["--train-iters", str(steps)])
    script = ROOT / "tools" / "launch" / "slurm.sh"
    variables = environment(PYTHON=sys.executable, NPROC_PER_NODE="1", MEGARL_LAUNCH=str(script.parent))
    out = ("--output", str(slurm.nodes.folder / "job.out"), "--chdir", str(slurm.nodes.folder))
    return slurm.submit(["--nodes", "2", *out, *variables, *options, str(script), str(run), *arguments])


@pytest.fixture
def slurm(sums_data, shared):
    shutil.copytree(sums_data, shared / "data")
    (shared / "runs").mkdir()
    with Nodes(2, shared) as nodes, Slurm(nodes) as cluster:
        yield cluster


def steps(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row["step"] for row in rows if "reward/mean" in row]


def wait_for_step(slurm: Slurm, run: Path, number: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while max(steps(run), default=0) < number:
        assert time.monotonic() < deadline, slurm.logs()
        time.sleep(0.2)


def check_whole(slurm: Slurm, run: Path, sums_data: Path, tmp_path: Path, number: int) -> None:
    """Check that the metrics are those of a run of this machine that nobody has stopped."""
    here = train(sums_data, tmp_path / "here", "--train-iters", str(number))
    assert here.returncode == 0 and steps(run) == [*range(1, number + 1)], slurm.logs()
    check_equal(here, Job(0, "", run), after=0)


def check_goes_on(slurm: Slurm, run: Path, job: int) -> None:
    """Check that the job that was queued again continues after its last step, and end it."""
    saved = max(steps(run))
    assert (run / "checkpoints" / f"step_{saved:06d}").exists(), slurm.logs()
    wait_for_step(slurm, run, saved + 2)  # SLURM waits two minutes before it begins a job again
    assert f"continues after step {saved}" in (slurm.nodes.folder / "job.out").read_text()
    slurm.run("scancel", str(job))
    done = steps(run)
    assert done == [*range(1, len(done) + 1)], done


def test_a_job_trains_on_both_nodes(slurm, sums_data, tmp_path):
    run = slurm.nodes.folder / "runs" / "a"
    slurm.wait(submit(slurm, run, 3), "COMPLETED")
    check_whole(slurm, run, sums_data, tmp_path, 3)


def test_a_job_goes_on_after_its_time_limit(slurm):
    """SIGTERM comes 60 seconds before the limit: the job saves its last step and is queued again."""
    run = slurm.nodes.folder / "runs" / "a"
    job = submit(slurm, run, 10_000, "--time", "60", "--signal", "B:TERM@60")
    wait_for_step(slurm, run, 2)
    minutes = int(slurm.state(job)["RunTime"].split(":")[1])  # hours:minutes:seconds
    slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}")
    deadline = time.monotonic() + LIMIT_S
    while slurm.state(job).get("Restarts") != "1":
        assert time.monotonic() < deadline, slurm.logs()
        time.sleep(1.0)
    said = (slurm.nodes.folder / "job.out").read_text()
    assert f"stopped by SIGTERM (time limit or preemption); job {job} is queued again" in said, said
    check_goes_on(slurm, run, job)


def test_a_job_goes_on_after_another_has_taken_its_nodes(slurm):
    run = slurm.nodes.folder / "runs" / "a"
    job = submit(slurm, run, 10_000, "--partition", "low")
    wait_for_step(slurm, run, 2)
    quiet = ("--output", "/dev/null")
    taking = slurm.submit(["--nodes", "2", "--exclusive", "--partition", "high", *quiet, "--wrap", "sleep 5"])
    slurm.wait(taking, "COMPLETED")
    check_goes_on(slurm, run, job)
