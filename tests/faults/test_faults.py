"""Whole jobs with one fault each: how long until everything is over, what is said, what is left. `pytest
tests/faults -m '' --write-table`

A case takes a job: three steps of the tiny model on two ranks, about 15 s on two free cores, and where
something hangs the time until that is noticed. The limits are those that users are promised."""

from __future__ import annotations

import pytest

from tests.e2e.jobs import COMMON, replace_flags
from tests.faults import table
from tests.faults.cases import CASES, QUICK, Case
from tests.faults.harness import Job, megarl


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name == QUICK else pytest.mark.nightly)
        for case in CASES
    ],
)
def test_a_fault_ends_the_job_in_time_with_one_message_and_leaves_nothing(
    case: Case, sums_data, tmp_path, request
):
    data = ["--model", str(sums_data / "model"), "--train-data", str(sums_data / "train.jsonl")]
    arguments = [*COMMON, *data, "--save", str(tmp_path / "run")]
    job = Job(tmp_path, megarl("train", replace_flags(arguments, case.flags)), case.fault)
    try:
        outcome = job.watch_end(job.wait_for_hit(), case.noticed_after[1] + case.limit_s)
    finally:
        job.end()
    assert case.problems(outcome) == [], f"{outcome.stderr}\n{outcome.stdout}"
    if request.config.getoption("write_table", False):
        table.FAILURES.write(table.key(case), table.row(case, outcome))


def test_the_documented_table_has_every_case_measured_within_its_limit():
    documented = table.FAILURES.rows(table.DOCUMENT.read_text())
    assert list(documented) == [table.key(case) for case in CASES]
    for case in CASES:
        seconds, limit = (
            float(cell.removesuffix(" s ").split()[-1])
            for cell in documented[table.key(case)].split("|")[4:6]
        )
        assert seconds <= limit == case.limit_s
