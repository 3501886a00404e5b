"""Whole jobs on two nodes with one fault each, under torchrun and on a Ray cluster. `pytest tests/nodes -m
nightly --write-table`

The nodes are namespaces of this machine; each has one rank."""

from __future__ import annotations

import pytest

from tests.e2e.jobs import COMMON, replace_flags
from tests.faults import table
from tests.faults.cases import ACROSS_NODES, LAUNCHERS, Case
from tests.faults.nodes_job import NodesJob
from tests.nodes.namespaces import Nodes
from tests.nodes.test_ray_nodes import copy_data

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("case", ACROSS_NODES, ids=lambda case: case.name)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_fault_on_a_node_ends_the_job_on_both_in_time(
    launcher: str, case: Case, sums_data, shared, request
):
    run, files = copy_data(sums_data, shared)
    with Nodes(2, shared) as nodes:
        arguments = replace_flags([*COMMON, *files, "--save", str(run)], case.flags)
        job = NodesJob(nodes, launcher, arguments, case.fault)
        try:
            outcome = job.watch_end(job.wait_for_hit(), case.noticed_after[1] + case.limit_s)
        finally:
            job.end()
    assert case.problems(outcome, launcher) == [], f"{outcome.stderr}\n{outcome.stdout}"
    if request.config.getoption("write_table"):
        key = table.key(case, launcher)
        table.FAILURES_ACROSS_NODES.write(key, table.row(case, outcome, launcher))
