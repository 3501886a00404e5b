"""A whole job in which one update is not finite on one rank: it ends and says where, or goes on without the
update.

pytest tests/e2e/test_nonfinite.py -m nightly        2 min"""

from __future__ import annotations

import math
import re

import pytest

from tests.e2e.jobs import train


@pytest.mark.nightly
def test_stop_names_role_step_mini_batch_and_samples(sums_data, tmp_path):
    job = train(sums_data, tmp_path / "run", fault="loss_not_finite")
    assert job.returncode != 0
    said = re.search(
        r"\[actor rank [01]\] update failed at step 2: .*NonFiniteUpdate: actor, mini-batch 1 of 2: "
        r"the gradient norm is nan: "
        r"the loss of the micro-batch of samples? [\d, and more]+ is nan \(rank 1\); gradients are "
        r"not finite: .* "
        r"Worst: sample \d+ \(log-prob -[\d.e+-]+ at response token \d+, -[\d.e+-]+ before the step\)",
        job.output,
    )
    assert said, job.output
    assert [row["step"] for row in job.steps] == [1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "role, fault, flags",
    [
        ("policy", "loss_not_finite", ()),
        (
            "policy",
            "loss_not_finite",
            ("--tensor-model-parallel-size", "2", "--no-use-distributed-optimizer"),
        ),
        ("critic", "value_loss_not_finite", ("--algorithm", "ppo")),
    ],
)
def test_skip_goes_on_without_the_update(sums_data, tmp_path, role, fault, flags):
    job = train(sums_data, tmp_path / "run", "--on-nonfinite", "skip", *flags, fault=fault)
    assert job.returncode == 0, job.output
    assert [row[f"{role}/updates_skipped"] for row in job.steps] == [0, 1, 0]
    assert (
        "update left out (--on-nonfinite skip): "
        + {"policy": "actor"}.get(role, role)
        + ", mini-batch 1 of 2"
        in job.output
    )
    for row in job.steps:
        assert (
            math.isfinite(row[f"{role}/loss"])
            and row[f"{role}/grad_norm"] > 0
            and row["mismatch/max_abs"] <= 1e-4
        )
