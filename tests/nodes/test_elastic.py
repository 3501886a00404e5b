"""A job that loses a node goes on with those that are left: --elastic-min-nodes under Ray, --nnodes 1:2 of torchrun.

    pytest tests/nodes -m nightly

The nodes are namespaces of this machine."""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e.jobs import Job, train
from tests.nodes.namespaces import Nodes
from tests.nodes import test_torchrun_nodes as torchrun
from tests.nodes.test_ray_nodes import exit_code, start, wait_for_steps

pytestmark = pytest.mark.timeout(900)
STEPS = ("--save-interval", "1", "--train-iters", "12")


def test_ray_goes_on_with_the_other_node(sums_data, tmp_path, shared):
    with Nodes(2, shared) as nodes:
        run = start(nodes, sums_data, *STEPS, "--elastic-min-nodes", "1", "--max-restarts", "1")
        wait_for_steps(run, 3, nodes)
        nodes.kill(1)
        assert exit_code(nodes, 600.0) == 0, nodes.log(0)
        log = nodes.log(0)
        assert re.search(r"\[driver\] node node1 was lost, with rank [01]", log), log
        assert "this attempt runs on 1 (--elastic-min-nodes 1)" in log
        check_goes_on(Job(0, log, run), train(sums_data, tmp_path / "run", *STEPS))


def test_torchrun_goes_on_with_the_other_node(sums_data, tmp_path, shared):
    """torchrun gives the lost node up after 15 s, and waits 30 s for another one."""
    with Nodes(2, shared) as nodes:
        limits = ("--nnodes", "1:2", "--max-restarts", "1")
        run, processes = torchrun.start(nodes, sums_data, *STEPS, torchrun=limits)
        wait_for_steps(run, 3, nodes)
        nodes.kill(1)
        assert processes[0].wait(300) == 0, torchrun.logs(nodes)
        check_goes_on(Job(0, nodes.log(0), run), train(sums_data, tmp_path / "run", *STEPS))


def check_goes_on(there: Job, here: Job) -> None:
    """Assert that `there`, which lost a node, has the prompts of `here` in its order, and its results but for rounding.

    One rank sums gradients in another order than two. Rewards are counts, so they are equal as long as no draw
    changes; a loss of order 1e-1 in fp32 has an error of 1e-7, which a learning rate of 1e-3 does not make
    larger than 1e-4 within twelve steps."""
    assert [row["step"] for row in there.steps] == list(range(1, 13))
    for one, other in zip(there.steps, here.steps, strict=True):
        assert one["reward/mean"] == pytest.approx(other["reward/mean"], abs=1e-6), one["step"]
        assert one["policy/loss"] == pytest.approx(other["policy/loss"], abs=1e-4), one["step"]
    assert prompts(there) == prompts(here)


def prompts(job: Job) -> list[list[str]]:
    """Return the logged prompts of every step."""
    files = sorted((job.folder / "rollouts").glob("step_*.jsonl"))
    return [[json.loads(line)["prompt"] for line in file.read_text().splitlines()] for file in files]
