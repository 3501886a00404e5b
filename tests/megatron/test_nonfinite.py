"""An update whose loss or gradient is not finite changes nothing, on any rank, and says where it comes from.

One torchrun job with two ranks (run_nonfinite.py) plants faults on rank 1: NaN in one sample's loss, in a
weight's gradient before ranks sum theirs, Inf in a gradient after they have (in a copy that the gradient norm
does not see, say), and gradients whose norm overflows.

    pytest tests/megatron/test_nonfinite.py [-m ""]"""

from __future__ import annotations

import json
import math
import re

import pytest

from megarl.metrics import combine
from tests.megatron.cases import run_ranks
from tests.megatron.layouts import LAYOUTS

QUICK = ("dp2/actor/loss", "dp2_do/actor/gradient", "tp2_sp/actor/copy", "pp2/actor/overflow")
FAULTS = ("loss", "gradient", "copy", "overflow")
ALL = (
    "one",
    "tp2",
    "tp2_sp",
    "tp2_sp_tied",
    "pp2",
    "pp2_tied",
    "cp2",
    "dp2",
    "dp2_do",
    "dp2_do_overlap",
    "pp2_vpp2",
    "tp2_sp_ep2",
    "tp2_sp_bf16",
    "pp2_bf16",
    "dp2_do_bf16",
)
CASES = dict.fromkeys(
    [*QUICK, "tp2_sp/critic/loss", "dp2_do/critic/loss", "dp2_fsdp/actor/loss", "dp2_fsdp_bf16/actor/loss"]
    + [f"{name}/actor/{fault}" for name in ALL for fault in FAULTS if not (fault == "copy" and "_do" in name)]
)
"""With the distributed optimizer there are no copies: each rank applies a part."""


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory) -> list[dict]:
    """Of each rank, about all cases of this file that are to be tested."""
    out = tmp_path_factory.mktemp("nonfinite")
    cases = dict.fromkeys(
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    )
    run_ranks("run_nonfinite.py", out, 2, *cases, "skip", "stop")
    return [json.loads((out / f"report_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.nightly) for case in CASES]
)
def test_nothing_changes_on_any_rank(reports, case):
    """Bit for bit: weights, moments, step counts, masters; and the next update is the one of a model that
    never saw the fault, whose schedule went on. Failed with Megatron's own step, which applies such a
    gradient, and where each rank decided by its own numbers."""
    ranks = [report[case] for report in reports if case in report]
    layout, _, fault = case.split("/")
    assert len(ranks) == LAYOUTS[layout].ranks
    for rank in ranks:
        assert rank["unchanged"] and rank["as_if_never"] and rank["moved"]
    (message,) = {rank["message"] for rank in ranks}
    (sample,) = {rank["sample"] for rank in ranks} - {None} or {None}
    said = {
        "loss": rf"the loss of the micro-batch of [^(]*\b{sample}\b.* is nan \(rank ",
        "gradient": r"linear_fc1\.weight \(rank ",
        "copy": rf"norm\S* \(rank {len(ranks) - 1}\)",
        "overflow": "every gradient is finite",
    }[fault]
    assert re.search(said, message), message
    assert ("the loss of the micro-batch of" in message) == (fault == "loss")


def test_skipped_updates_are_counted_and_have_no_part_in_the_means(reports):
    """Of 6 updates a step. Failed with means over all of them, which are NaN, and with the count on every
    rank."""
    steps = [combine(of_ranks) for of_ranks in zip(*(report["skip"][:4] for report in reports), strict=True)]
    assert [step["policy/updates_skipped"] for step in steps] == [0, 1, 3, 6]
    for step in steps[:3]:
        assert (
            all(math.isfinite(value) for value in step.values())
            and step["policy/loss"] > 0
            and step["policy/grad_norm"] > 0
        )
    assert steps[3].keys() == {"policy/updates_skipped"}


def test_more_than_ten_in_a_row_end_the_job_on_all_ranks(reports):
    """Two at the end of the third step, six of the fourth, and the third of the fifth: the eleventh. Failed
    with those of a step alone."""
    (message,) = {report["skip"][4] for report in reports}
    assert message.startswith(
        "actor, mini-batch 3 of 3 in epoch 1 of 2: the gradient norm is nan: the loss of the micro-batch of"
    )
    assert "So were the 10 updates before it" in message and "--lr" in message


def test_stop_says_which_update_of_which_role(reports):
    assert all("policy/updates_skipped" not in report["stop"][0] for report in reports)
    (message,) = {report["stop"][1] for report in reports}
    assert message.startswith(
        "actor, mini-batch 2 of 3 in epoch 2 of 2: the gradient norm is nan: the loss of the micro-batch of"
    )
    assert "is nan (rank 1); gradients are not finite" in message
    assert "No weight was changed" in message and "--on-nonfinite skip" in message
