"""A job trains the same whatever starts its ranks: torchrun, `megarl train` by itself or through Ray, or inline.

pytest tests/e2e/test_executors.py -m nightly"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.jobs import COMMON, Job, replace_flags
from tests.e2e.test_resume import check_equal
from tests.launch import run


TRAIN = ("-m", "megarl.cli", "train")
PPO = ("--algorithm", "ppo", "--kl-mode", "reward", "--kl-coef", "0.05", "--critic-lr", "1e-2")


def train(program: tuple[str, ...], data: Path, save: Path, *flags: str) -> Job:
    """Run a job by processes that are all started anew: Ray reads its environment as it is imported."""
    files = ["--model", str(data / "model"), "--train-data", str(data / "train.jsonl"), "--save", str(save)]
    done = run(*program, *replace_flags([*COMMON, *files], [*flags]), timeout=240)
    return Job(done.returncode, done.stdout + done.stderr, save)


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("num_ranks, executors", [(1, ("ray", "inline")), (2, ("ray",))])
def test_metrics_and_weights_are_equal_bit_for_bit(num_ranks, executors, algorithm, sums_data, tmp_path):
    flags = ("--nproc-per-node", str(num_ranks), *(PPO if algorithm == "ppo" else ()))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    own = train(TRAIN, sums_data, tmp_path / "own", *flags)
    others = [train((*torchrun, "-m", "megarl.train"), sums_data, tmp_path / "torchrun", *flags)]
    others += [train(TRAIN, sums_data, tmp_path / name, *flags, "--executor", name) for name in executors]
    for other in others:
        assert other.returncode == 0, other.output
        check_equal(own, other, after=0)
