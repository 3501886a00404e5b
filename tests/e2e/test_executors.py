"""A job trains the same whatever starts its ranks: torchrun, `megarl train` by itself or through Ray, or inline.

pytest tests/e2e/test_executors.py -m nightly"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.jobs import COMMON, Job, replace_flags, train
from tests.e2e.test_resume import PPO, check_equal
from tests.launch import run


def torchrun(data: Path, save: Path, num_ranks: int, *flags: str) -> Job:
    """As `train`, started by torchrun."""
    files = ["--model", str(data / "model"), "--train-data", str(data / "train.jsonl"), "--save", str(save)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks]
    done = run(*launcher, "-m", "megarl.train", *replace_flags([*COMMON, *files], [*flags]), timeout=240)
    return Job(done.returncode, done.stdout + done.stderr, save)


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("num_ranks, executors", [(1, ("ray", "inline")), (2, ("ray",))])
def test_metrics_and_weights_are_equal_bit_for_bit(num_ranks, executors, algorithm, sums_data, tmp_path):
    flags = ("--nproc-per-node", str(num_ranks), *(PPO if algorithm == "ppo" else ()))
    own = train(sums_data, tmp_path / "own", *flags)
    others = [torchrun(sums_data, tmp_path / "torchrun", num_ranks, *flags)]
    others += [train(sums_data, tmp_path / name, *flags, "--executor", name) for name in executors]
    for other in others:
        assert other.returncode == 0, other.output
        check_equal(own, other, after=0)
