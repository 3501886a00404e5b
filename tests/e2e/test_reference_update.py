"""Whole jobs whose reference takes over the actor's weights: the KL begins anew at 0, in every layout, and a resumed
run goes on with the same reference.

    pytest tests/e2e/test_reference_update.py                  one layout
    pytest tests/e2e/test_reference_update.py -m nightly       others, a resume"""

from __future__ import annotations

import shutil

import pytest

from tests.e2e.jobs import train

FLAGS = (
    *("--kl-mode", "loss", "--kl-coef", "0.05", "--reference-update-interval", "2", "--train-iters", "5"),
    *("--save-interval", "3", "--lr", "1e-2"),
)
LAYOUTS = {
    "dp2": (),
    "tp2": ("--tensor-model-parallel-size", "2", "--reference-tensor-model-parallel-size", "1"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "reference_on_rank_1": ("--actor-ranks", "0", "--rollout-ranks", "0", "--reference-ranks", "1"),
    "offload": ("--offload", "parameters", "gradients", "optimizer", "--no-reshard-alias"),
    "staleness": ("--staleness", "1"),
}
SAME_KERNELS = 1e-5
"""Nats per response of 16 tokens, in float32: 0 where both passes run the same kernels, rounding where actor and
reference are split differently."""


@pytest.mark.parametrize(
    "name", [name if name == "dp2" else pytest.param(name, marks=pytest.mark.nightly) for name in LAYOUTS]
)
def test_the_kl_begins_anew_after_each_update_of_the_reference(sums_data, tmp_path, name):
    job = train(sums_data, tmp_path / "run", *FLAGS, *LAYOUTS[name])
    assert job.returncode == 0, job.output
    kl = [row["kl/per_response"] for row in job.steps]
    assert max(kl[0], kl[2], kl[4]) <= SAME_KERNELS and min(kl[1], kl[3]) > 100 * SAME_KERNELS, kl
    for step in (2, 4):
        assert f"step {step}: reference has taken over the weights of actor" in job.output
    assert not [*job.folder.glob(".reference*")]


@pytest.mark.nightly
def test_a_resumed_run_has_the_reference_of_its_checkpoint(sums_data, tmp_path):
    """Bit for bit: the checkpoint of step 3 holds the reference of step 2, which no file of the run holds."""
    whole = train(sums_data, tmp_path / "whole", *FLAGS)
    assert whole.returncode == 0, whole.output
    shutil.copytree(whole.folder, tmp_path / "part")
    for later in (tmp_path / "part" / "checkpoints").glob("step_000005*"):
        shutil.rmtree(later)
    resumed = train(sums_data, tmp_path / "part", *FLAGS, "--load", str(tmp_path / "part"))
    assert resumed.returncode == 0, resumed.output
    assert "continues after step 3" in resumed.output
    same = [name for name in whole.steps[3] if not name.startswith(("time/", "throughput/", "memory/"))]
    for mine, wanted in zip(resumed.steps[3:], whole.steps[3:], strict=True):
        assert {name: mine[name] for name in same} == {name: wanted[name] for name in same}
    flags = [*FLAGS]
    at = flags.index("--reference-update-interval")
    del flags[at : at + 2]
    shutil.rmtree(tmp_path / "part" / "checkpoints" / "step_000005")
    refused = train(sums_data, tmp_path / "part", *flags, "--load", str(tmp_path / "part"))
    assert refused.returncode != 0 and "Try --reference-update-interval" in refused.output
