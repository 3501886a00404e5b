"""Two and four processes, a real gloo group, the vocabulary split between them: equal to one rank, whatever
share of it is padding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("run_tensor_parallel.py")


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=(pytest.mark.slow, pytest.mark.tail))])
def test_ranks_equal_one(kernels, num_ranks, tmp_path):
    command = [sys.executable, "-P", str(SCRIPT)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(num_ranks)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, "\n".join(errors)
