"""Every algorithm that samples, with staleness 0 and 1, in one turn and in several: two steps, or the reason why not.

    pytest tests/e2e/test_algorithm_matrix.py -m nightly

The combinations are generated from the registry, so a new algorithm is tried in all of them."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from megarl.algorithms import REGISTRY
from tests.e2e.jobs import train

pytestmark = pytest.mark.nightly
ENV = f"{Path(__file__).with_name('envs.py')}:LowerCase"
TURNS = {
    "one turn": (),
    "several turns": (
        *("--env", ENV, "--max-turns", "3", "--max-context-length", "72", "--max-response-length", "8"),
        *("--reward-max-failed-share", "1"),
    ),
}
SAMPLING = [name for name, one in REGISTRY.items() if one.needs_rollout]
REFUSED = {("several turns", 1): "--staleness (1)"}
"""Turns and staleness that no algorithm trains with, and the flag that the refusal names."""


@pytest.mark.parametrize(
    "name, staleness, turns", itertools.product(SAMPLING, (0, 1), TURNS), ids=lambda one: str(one)
)
def test_it_trains_or_says_why_not(sums_data, tmp_path, name, staleness, turns):
    flags = ["--algorithm", name, "--staleness", str(staleness), "--train-iters", "2", *TURNS[turns]]
    if REGISTRY[name].is_taught:
        flags += ["--reference-model", str(sums_data / "model")]
    if getattr(REGISTRY[name], "one_update", False):
        flags += ["--global-batch-size", "16"]
    job = train(sums_data, tmp_path / "run", *flags)
    if (turns, staleness) in REFUSED:
        assert job.returncode == 2 and REFUSED[turns, staleness] in job.output, job.output
        return
    assert job.returncode == 0, job.output
    assert len(job.steps) == 2
    for row in job.steps:
        assert math.isfinite(row["policy/loss"]) and math.isfinite(row["policy/grad_norm"])
        assert (
            row.get("mismatch/max_abs", 0.0) <= 1e-4
        )  # with staleness a step may have no token of its version
    if not REGISTRY[name].is_taught:  # the teacher is the model itself, so that nothing is learnt
        assert any(row["policy/grad_norm"] > 0 for row in job.steps)
