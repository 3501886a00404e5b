"""A link that is cut and heals: the node that was cut off has ended by itself, the job goes on with it or
its replacement from the last checkpoint, and one run folder holds each step once.

    pytest tests/nodes -m nightly

The nodes are namespaces of this machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.jobs import Job, train
from tests.e2e.test_resume import check_equal
from tests.faults.harness import command_of
from tests.nodes import test_ray_nodes as ray
from tests.nodes import test_torchrun_nodes as torchrun
from tests.nodes.namespaces import Nodes

pytestmark = pytest.mark.timeout(600)
STEPS = ("--save-interval", "1", "--train-iters", "12")
FENCED_S = 15.0
"""Limit for the end of the ranks of a node that is cut off."""


def wait_until_no_rank_is_left(nodes: Nodes, node: int) -> None:
    deadline = time.monotonic() + FENCED_S
    while any(b"megarl.train\0" in command_of(pid) for pid in nodes.pids(node)):
        assert time.monotonic() < deadline, nodes.log(node)
        time.sleep(0.2)


def check_run(run: Path, log: str, whole: Job) -> None:
    """Assert that the run folder has each step once, as a job that nobody interrupted made it, bit for bit."""
    there = Job(0, log, run)
    assert [row["step"] for row in there.steps] == list(range(1, 13)), log
    check_equal(whole, there, after=0)


def test_torchrun_goes_on_with_a_new_agent_on_the_node(sums_data, tmp_path, shared):
    with Nodes(2, shared) as nodes:
        limits = ("--nnodes", "2", "--max-restarts", "1")
        run, processes = torchrun.start(nodes, sums_data, *STEPS, torchrun=limits)
        torchrun.wait_for_steps(run, 3, nodes)
        nodes.cut(1)
        wait_until_no_rank_is_left(nodes, 1)
        processes[1].wait(FENCED_S)
        nodes.heal(1)
        processes.append(torchrun.start_node(nodes, 1, SKIPPED_PIDS="50"))
        assert processes[0].wait(300) == 0, torchrun.logs(nodes)
        log = torchrun.logs(nodes)
    check_run(run, log, train(sums_data, tmp_path / "run", *STEPS))


def test_ray_goes_on_with_the_node_that_is_back(sums_data, tmp_path, shared):
    with Nodes(2, shared) as nodes:
        run = ray.start(nodes, sums_data, *STEPS, "--max-restarts", "1")
        ray.wait_for_steps(run, 3, nodes)
        nodes.cut(1)
        wait_until_no_rank_is_left(nodes, 1)
        nodes.heal(1)
        assert ray.exit_code(nodes, 300) == 0, nodes.log(0)
        log = nodes.log(0)
    check_run(run, log, train(sums_data, tmp_path / "run", *STEPS))
