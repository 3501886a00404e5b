"""Two processes, a real gloo group, the vocabulary split between them: equal to one rank, whatever share of it is padding."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("run_tensor_parallel.py")


def test_two_ranks_equal_one(tmp_path):
    command = [sys.executable, "-P", str(SCRIPT)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path / "store")], stderr=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
