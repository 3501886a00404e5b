"""Every layout gives the outputs, losses, gradients, gradient norms and weights of one rank.

One torchrun job (run_equivalence.py, about a minute) makes a forward pass and two updates of each case of
layouts.py that is asked for and compares them with those of one rank that packs its micro-batches otherwise;
these tests judge what it wrote. Planted faults must be found.

    pytest tests/megatron/test_equivalence.py [-k pp2_vpp2]"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.megatron.cases import run_ranks
from tests.megatron.layouts import CASES, LAYOUTS, PLANTED, QUICK
from tests.shared import selected_cases

FP32 = dict(output=1e-5, loss=1e-6, grad_norm=1e-6, gradient=1e-5, weight=1e-4)
"""Loss and norm relative, `gradient` relative to the largest element of its parameter. Absolute: log-probs
(down to -15) or values, and weights after two steps of Adam with a learning rate of 1e-2. Observed: 2.9e-6,
3.9e-7, 2.5e-7, 3.2e-6, 9.1e-6."""
BF16 = dict(output=0.2, loss=1e-2, grad_norm=2e-2, gradient=0.1, weight=5e-2)
"""Sanity: 8 bits. A gradient that is lost or comes twice is off by a third or more."""


pytestmark = pytest.mark.timeout(1200)  # the first test waits for the job of them all: two to eight minutes


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory) -> list[dict]:
    """Of each rank, about all cases of this file that are to be tested, and the same in fp32."""
    out = tmp_path_factory.mktemp("equivalence")
    wanted = selected_cases(request, "case")
    cases = dict.fromkeys(wanted + [case.replace("_bf16", "") for case in wanted])
    ranks = max(LAYOUTS[case.partition("/")[0]].ranks for case in cases)
    run_ranks("run_equivalence.py", out, ranks, *cases)
    return [json.loads((out / f"report_{rank}.json").read_text()) for rank in range(ranks)]


def faults(reports: list[dict], case: str) -> Iterator[str]:
    """What differs by more than rounding from one rank, over the ranks of a case ("gradient 0.5 of
    model.norm.weight"), and weights of which ranks have copies that are not bit-equal."""
    parts = [report[case] for report in reports if case in report]
    layout = LAYOUTS[case.partition("/")[0]]
    limits = BF16 if layout.bf16 else FP32
    assert len(parts) == layout.ranks
    for kind in ("loss", "grad_norm"):
        for step, wanted in enumerate(parts[0]["one_rank"][kind]):
            error = abs(sum(part[kind][step] for part in parts) - wanted) / abs(wanted)
            if not error <= limits[kind]:
                yield f"{kind} {error:.1e} of update {step}"
    for kind in ("output", "gradient", "weight"):
        yield from (
            f"{kind} {error:.1e} of {name}"
            for error, name in (part[kind] for part in parts)
            if not error <= limits[kind]
        )
    copies = {(where, checksum) for part in parts for where, checksum in part["copies"].items()}
    yield from (
        f"copies of {where} differ"
        for where, count in Counter(where for where, _ in copies).items()
        if count > 1
    )


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.nightly) for case in CASES],
)
def test_layout_equals_one_rank(reports, case):
    assert [*faults(reports, case)] == []


@pytest.mark.parametrize("case", [case for case in QUICK if "bf16" in case])
def test_bf16_gradient_norm_is_that_of_fp32_rounded(reports, case):
    """Of one rank: that several micro-batches, and both uses of tied embeddings, are summed in fp32."""
    fp32 = case.replace("_bf16", "")
    here, there = (
        next(report[name]["one_rank"]["grad_norm"][0] for report in reports if name in report)
        for name in (case, fp32)
    )
    assert here == pytest.approx(there, rel=0.03)  # lost, or added twice, would be off by a third or more


@pytest.mark.parametrize("case", PLANTED)
def test_planted_fault_is_found(reports, case):
    assert any(fault.startswith("gradient") for fault in faults(reports, case))


@pytest.mark.parametrize("case", ["dp2/actor/packed"])
def test_valid_tokens_are_uneven(reports, case):
    """Over data-parallel ranks and over micro-batches: even ones would hide a wrong denominator."""
    here, there = (report[case]["tokens"] for report in reports[:2])
    assert len(here) == len(there) > 1 and len({*here, *there}) > 2 and sum(here) != sum(there)
