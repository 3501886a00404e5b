"""Two and four processes, a real gloo group, the vocabulary split between them: equal to one rank, whatever
share of it is padding."""

from pathlib import Path

import pytest

from tests.launch import run_ranks

SCRIPT = Path(__file__).with_name("run_tensor_parallel.py")


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "kernels", ["torch", pytest.param("interpret", marks=pytest.mark.nightly)], indirect=True
)
def test_ranks_equal_one(kernels, num_ranks, tmp_path):
    # Triton decides at its import whether it compiles or interprets
    run_ranks(
        num_ranks,
        lambda rank: ["-P", SCRIPT, rank, num_ranks, tmp_path / "store"],
        timeout=120,
        preloaded=kernels == "torch",
        environment={"OMP_NUM_THREADS": "1"},
    )
