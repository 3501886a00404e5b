"""Whole jobs with one fault each: how long until everything is over, what is said, what is left. `pytest
tests/faults -m '' --write-table`

A case takes a job: three steps of the tiny model on two ranks, about 15 s on two free cores, and where
something hangs the time until that is noticed.
tests/nodes/test_node_faults.py has such jobs on two nodes."""

from __future__ import annotations

import pytest

from tests.e2e.jobs import COMMON, replace_flags
from tests.faults import table
from tests.faults.cases import CASES, QUICK, Case
from tests.faults.harness import Job, megarl

BUSY = 2.5
"""Times the limit that users are promised, where a test may share its machine: only with --write-table is the time
measured, on an idle one."""
FLAGS = {"processes": (), "ray": ("--executor", "ray")}
"""How `megarl train` starts the ranks of a job on this machine, and the flags for it."""


def nightly_but_one(executor: str, case: Case):
    is_default = executor == "processes" and case.name == QUICK
    marks = [] if is_default else [pytest.mark.nightly]
    if executor == "ray" and (case.kind, case.victim) == ("SIGKILL", "driver"):
        reason = "two agents of the Ray that the driver has started outlive it (docs/cluster_failures.md)"
        marks.append(pytest.mark.xfail(reason=reason, strict=True))
    return pytest.param(executor, case, id=f"{executor}-{case.name}", marks=marks)


@pytest.mark.parametrize(
    "executor, case", [nightly_but_one(executor, case) for executor in FLAGS for case in CASES]
)
def test_a_fault_ends_the_job_in_time_with_one_message_and_leaves_nothing(
    executor: str, case: Case, sums_data, tmp_path, request
):
    data = ["--model", str(sums_data / "model"), "--train-data", str(sums_data / "train.jsonl")]
    arguments = [*COMMON, *data, "--save", str(tmp_path / "run"), *FLAGS[executor]]
    job = Job(tmp_path, megarl("train", replace_flags(arguments, case.flags)), case.fault)
    measures = request.config.getoption("write_table")
    patience = 1.0 if measures else BUSY
    try:
        outcome = job.watch_end(job.wait_for_hit(), case.noticed_after[1] + patience * case.limit_s)
    finally:
        job.end()
    assert case.problems(outcome, patience=patience) == [], f"{outcome.stderr}\n{outcome.stdout}"
    if measures:
        if executor == "ray":
            table.FAILURES_ON_RAY.write(table.key(case, "Ray"), table.row(case, outcome, "Ray"))
        else:
            table.FAILURES.write(table.key(case), table.row(case, outcome))


@pytest.mark.parametrize(
    "documented, is_complete",
    [(table.FAILURES, True), (table.FAILURES_ON_RAY, False), (table.FAILURES_ACROSS_NODES, False)],
)
def test_the_documented_table_has_the_cases_measured_within_their_limits(documented, is_complete):
    rows = documented.rows()
    assert list(rows) == [key for key in documented.keys if is_complete or key in rows]
    for row in rows.values():
        seconds, limit = (
            float(cell.removesuffix(" s ").split()[-1])
            for cell in row.split("|")[documented.num_key_columns + 1 : documented.num_key_columns + 3]
        )
        assert seconds <= limit
