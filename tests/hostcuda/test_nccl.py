"""The backend of the emulated devices has gloo's results and NCCL's rules. One job of four ranks
(run_nccl.py) does the work.

make test-hostcuda ARGS=tests/hostcuda/test_nccl.py"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.launch import run_ranks

SCRIPT = Path(__file__).with_name("run_nccl.py")


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    out = tmp_path_factory.mktemp("nccl")
    run_ranks(4, lambda rank: ["-P", SCRIPT, out, rank], timeout=200)
    return [json.loads((out / f"report_{rank}.json").read_text()) for rank in range(4)]


def test_collectives_have_gloos_results(reports):
    for rank, report in enumerate(reports):
        assert report["backend"] == "nccl" and report["cuda"] == report["cpu"]
        assert report["cuda"]["sum"] == [60, 64, 68, 72] and report["cuda"]["broadcast"] == [20, 21, 22, 23]
        assert report["cuda"]["batch"][0] == 10 * ((rank - 1) % 4)
        assert report["mean"] == [1.5]


def of_ranks(reports: list[dict], fault: str, part: str = "faults") -> list[str]:
    """Messages of the ranks that met a planted fault."""
    return [report[part][fault] for report in reports if fault in report[part]]


@pytest.mark.parametrize(
    "fault, count, message",
    [
        ("CPU tensor", 4, "No backend type associated with device type cpu"),
        ("partial batch", 2, r"ranks \[2, 3\] have not taken part"),
        ("missing rank", 3, r"ranks \[3\] have not taken part"),
        ("same device", 4, r"Duplicate GPU detected: ranks \[(0, 1|2, 3)\]"),
        ("used before wait", 4, r"race: aten::add[.\w]* .* reads memory that all_reduce .* wrote"),
        ("used after wait", 4, "^$"),
    ],
)
def test_planted_faults_are_reported(reports, fault, count, message):
    found = of_ranks(reports, fault)
    assert len(found) == count
    for text in found:
        assert re.search(message, text, re.DOTALL), text


def test_groups_that_only_some_ranks_create_are_reported(reports):
    assert any("not created in the same order" in text for text in of_ranks(reports, "order", "groups"))
    (alone,) = of_ranks(reports, "alone", "groups")
    assert "ranks [1] have not taken part" in alone
