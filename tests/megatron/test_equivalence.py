"""Every layout gives the losses, gradients, gradient norms and weights of one rank.

One torchrun job with four ranks (run_equivalence.py) makes two updates of each case of layouts.py and compares them, in the same job,
with those of one rank that packs its micro-batches otherwise; these tests judge what it wrote. Planted faults must be found.

    pytest tests/megatron/test_equivalence.py"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest

from tests.megatron.cases import run_ranks
from tests.megatron.layouts import CASES, LAYOUTS, MUTANTS

FP32 = dict(loss=1e-6, grad_norm=2e-6, gradient=1e-5, weight=1e-4)
"""Relative, `gradient` to the largest element of its parameter, but `weight`: absolute, after two steps of Adam with a learning rate of 1e-2."""
BF16 = dict(loss=2e-3, grad_norm=2e-2, gradient=5e-2, weight=2e-2)
"""Sanity: 8 bits. A gradient that is lost or comes twice is off by a third or more."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    out = tmp_path_factory.mktemp("equivalence")
    run_ranks("run_equivalence.py", out, 4)
    return [json.loads((out / f"report_{rank}.json").read_text()) for rank in range(4)]


def faults(reports: list[dict], case: str) -> Iterator[str]:
    """What differs by more than rounding from one rank, over the ranks of a case: "gradient 0.5 of model.norm.weight"."""
    parts = [report[case] for report in reports if case in report]
    layout = LAYOUTS[case.partition("/")[0]]
    limits = BF16 if layout.bf16 else FP32
    assert len(parts) == layout.ranks
    for kind in ("loss", "grad_norm"):
        for step, wanted in enumerate(parts[0]["one_rank"][kind]):
            error = abs(sum(part[kind][step] for part in parts) - wanted) / abs(wanted)
            if not error <= limits[kind]:
                yield f"{kind} {error:.1e} of update {step}"
    for kind in ("gradient", "weight"):
        error, name = max((part[kind] for part in parts), key=lambda of: (math.isnan(of[0]), of[0]))
        if not error <= limits[kind]:
            yield f"{kind} {error:.1e} of {name}"


@pytest.mark.parametrize("layout, role, packing", CASES)
def test_layout_equals_one_rank(reports, layout, role, packing):
    assert [*faults(reports, f"{layout}/{role}/{packing}")] == []


@pytest.mark.parametrize("mutant, layout", MUTANTS.items())
def test_planted_fault_is_found(reports, mutant, layout):
    assert any(fault.startswith("gradient") for fault in faults(reports, f"{layout}/actor/packed/{mutant}"))


def test_valid_tokens_are_uneven(reports):
    """Over data-parallel ranks and over micro-batches: even ones would hide a wrong denominator."""
    here, there = (report["dp2/actor/packed"]["tokens"] for report in reports[:2])
    assert len(here) == len(there) > 1 and len({*here, *there}) > 2 and sum(here) != sum(there)
