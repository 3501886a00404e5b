"""Layouts on four emulated devices over NCCL's stand-in have the numbers of one rank, as on the CPU.

The cases, limits and planted faults are those of tests/megatron/test_equivalence.py. Copies run late here and
races are errors. Gradients of a distributed optimizer are not compared, as no rank has whole ones on CUDA.

    make test-hostcuda ARGS=tests/hostcuda/test_equivalence.py"""

from __future__ import annotations

import json

import pytest

from tests.megatron.cases import run_ranks
from tests.megatron.test_equivalence import faults

LAYOUTS = (
    "one",
    "tp2_sp",
    "tp2_sp_selective",
    "tp2_one_key",
    "pp2_vpp2",
    "dp2",
    "dp2_do_overlap",
    "ep2_mixtral",
    "tp2_sp_ep2_latents",
    "cp2_gemma3",
    "cp2_latents",
    "tp2_pp2",
    "tp2_sp_cp2",
    "tp2_sp_dp2_do",
    "pp2_dp2_tied_do",
    "tp2_sp_ep2_etp2_do",
)
CASES = [f"{layout}/actor/packed" for layout in LAYOUTS] + ["tp2_sp/critic/single", "dp2_do/critic/single"]
PLANTED = ["dp2/actor/packed/local_token_count", "tp2_sp/actor/packed/unmarked_norms"]


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    out = tmp_path_factory.mktemp("equivalence")
    run_ranks("run_equivalence.py", out, 4, *CASES, *PLANTED)
    return [json.loads((out / f"report_{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("case", CASES)
def test_layout_equals_one_rank(reports, case):
    assert [*faults(reports, case)] == []


@pytest.mark.parametrize("case", PLANTED)
def test_planted_fault_is_found(reports, case):
    assert any(fault.startswith("gradient") for fault in faults(reports, case))
