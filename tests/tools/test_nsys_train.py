"""tools/nsys_train.sh with a stand-in for nsys, which writes its options and runs the program.

pytest tests/tools/test_nsys_train.py"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "nsys_train.sh"
STAND_IN = """#!/usr/bin/env bash
while [[ $1 == profile || $1 == -* ]]; do options+=("$1"); shift; done
printf '%s\\n' "${options[@]}" > "$NSYS_LOG.$RANK"
exec "$@"
"""


def run(folder: Path, *arguments: str, nsys: bool = True, python: str = "echo", **environment: str):
    path = "/usr/bin:/bin"
    if nsys:
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / "nsys").write_text(STAND_IN)
        (folder / "bin" / "nsys").chmod(0o755)
        path = f"{folder / 'bin'}:{path}"
    return subprocess.run(
        [SCRIPT, *arguments],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHON": python, "NSYS_LOG": str(folder / "nsys"), **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_torchrun_starts_this_script_on_each_rank(tmp_path):
    done = run(tmp_path, "--nproc-per-node", "2", "--out", "reports", "--", "@a.args", "--seed", "1")
    assert done.returncode == 0, done.stderr
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 --no-python"
    rank = f"{SCRIPT} --as-rank {tmp_path}/reports @a.args --seed 1 --profile nsys"
    assert done.stdout.strip() == f"{torchrun} {rank}"
    assert (tmp_path / "reports").is_dir()
    several = run(tmp_path, "--nnodes", "2", "--rdzv-endpoint", "a:1", "--", "@a.args").stdout
    assert "--standalone" not in several and "--nnodes 2 --rdzv-endpoint a:1 --no-python" in several


def test_a_rank_runs_under_nsys_within_the_capture_range(tmp_path):
    arguments = ("--as-rank", "out", "@a.args", "--log-name", "two words")
    done = run(tmp_path, *arguments, RANK="3", NSYS_OPTIONS="--gpu-metrics-device=0 --stats=true")
    assert done.stdout.strip() == "-u -P -m megarl.train @a.args --log-name two words"
    options = (tmp_path / "nsys.3").read_text().split()
    assert options[:2] == ["profile", "--output=out/rank_3"]
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=stop"} <= {*options}
    assert options[-2:] == ["--gpu-metrics-device=0", "--stats=true"]


@pytest.mark.parametrize(
    "arguments, nsys, told",
    [
        (("--", "@a.args"), False, "nsys is not on PATH. Install Nsight Systems"),
        (("--nproc-per-node", "2"), True, "there are no arguments of megarl train. Write them after --."),
    ],
)
def test_what_is_missing_is_named(tmp_path, arguments, nsys, told):
    done = run(tmp_path, *arguments, nsys=nsys)
    assert done.returncode == 2 and f"tools/nsys_train.sh: {told}" in done.stderr


@pytest.mark.nightly
def test_real_ranks_under_torchrun(tmp_path):
    """Every rank comes as far as megarl's own check, which wants a GPU."""
    from sums.files import make_sums

    make_sums(tmp_path / "data", seed=0)
    job = f"""--algorithm grpo --model {tmp_path}/data/model --train-data {tmp_path}/data/train.jsonl --save run
        --max-prompt-length 32 --max-response-length 16 --train-iters 3 --profile-step-start 1 --profile-step-end 2 --profile-ranks 0 1"""
    arguments = ("--nproc-per-node", "2", "--", *job.split())
    done = run(tmp_path, *arguments, python=sys.executable)
    assert "--profile (nsys): Nsight Systems records GPUs, and this machine has none." in done.stderr
    assert done.returncode != 0 and (tmp_path / "nsys.0").exists() and (tmp_path / "nsys.1").exists()
