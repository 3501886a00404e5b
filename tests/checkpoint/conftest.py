"""What the ranks of run_checkpoints.py wrote, for all tests here: one torchrun job with two ranks, about 20
s."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Path:
    """The folder with models, checkpoints and reports."""
    out = tmp_path_factory.mktemp("checkpoints")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(Path(__file__).with_name("run_checkpoints.py")),
            str(out),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=out,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.fixture(scope="session")
def reports(saved: Path) -> list[dict]:
    return [json.loads((saved / f"report_{rank}.json").read_text()) for rank in (0, 1)]
