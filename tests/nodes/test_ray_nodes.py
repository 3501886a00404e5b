"""A job on two nodes of a Ray cluster names a node that dies, a link that is cut, and a folder that is not shared.

    pytest tests/nodes -m nightly

The nodes are namespaces of this machine."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.jobs import COMMON, replace_flags
from tests.nodes.namespaces import Nodes, address

RAY_NODE = Path(__file__).with_name("ray_node.sh")
SUBMIT = Path(__file__).parents[2] / "tools" / "launch" / "ray_submit.sh"
pytestmark = pytest.mark.timeout(400)
RAY = ("--executor", "ray", "--nnodes", "2", "--nproc-per-node", "1")


def copy_data(data: Path, folder: Path) -> tuple[Path, list[str]]:
    """Copy model and data to where all nodes see them. Returns the run folder, and the flags of model and data."""
    shutil.copytree(data, folder / "data")
    run, own_data = folder / "runs" / "run", folder / "data"
    run.parent.mkdir()
    return run, ["--model", str(own_data / "model"), "--train-data", str(own_data / "train.jsonl")]


def start(nodes: Nodes, data: Path, *flags: str, hides: Path | None = None) -> Path:
    """Start a cluster and a job on it. Returns the run folder.

    Args:
        hides: a folder that node 1 does not see."""
    run, files = copy_data(data, nodes.folder)
    arguments = replace_flags([*COMMON, *files, "--save", str(run)], [*RAY, *flags])
    start_cluster(
        nodes, [sys.executable, "-m", "megarl.cli", "train", *arguments], NODE_HIDES=str(hides or "")
    )
    return run


def start_cluster(nodes: Nodes, command: list[str], **env: str) -> None:
    """Start a cluster of two nodes, then a command on its head.

    Args:
        env: further variables of the nodes: NODE_JOB_SERVER (ray_node.sh); NODE_HIDES, of node 1."""
    hides = env.pop("NODE_HIDES", "")
    env |= {
        "NODES": "2",
        "HEAD": address(0),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(24),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # by default 15: on a busy machine ranks would hardly run
    }
    node = ["bash", str(RAY_NODE), sys.executable]
    nodes.start(0, [*node, *command], **env)
    nodes.start(1, node, **env, NODE_HIDES=hides)


def exit_code(nodes: Nodes, seconds: float) -> int:
    code, deadline = nodes.folder / "node0" / "code", time.monotonic() + seconds
    while not (code.exists() and code.read_text().strip()):
        assert time.monotonic() < deadline, nodes.log(0)
        time.sleep(0.1)
    return int(code.read_text())


def test_a_node_that_dies_is_named_with_its_ranks(sums_data, shared):
    with Nodes(2, shared) as nodes:
        run = start(nodes, sums_data, "--train-iters", "1000")
        wait_for_steps(run, 3, nodes)
        nodes.kill(1)
        killed = time.monotonic()
        assert exit_code(nodes, 60) == 1, nodes.log(0)
        seconds = time.monotonic() - killed
        found = re.search(r"\[driver\] node node1 was lost, with rank [01]: actor", nodes.log(0))
        assert found, (seconds, nodes.log(0))


def test_a_cut_link_is_named_within_15_s(sums_data, shared):
    with Nodes(2, shared) as nodes:
        run = start(nodes, sums_data, "--train-iters", "1000")
        wait_for_steps(run, 3, nodes)
        nodes.cut(1)
        cut = time.monotonic()
        assert exit_code(nodes, 60) == 1, nodes.log(0)
        seconds = time.monotonic() - cut
        print(f"cut link under Ray: over after {seconds:.1f} s")
        found = re.search(
            r"\[driver\] node node1 was lost, with rank [01]: actor.* no sign of life", nodes.log(0)
        )
        assert found and seconds < 20, (seconds, nodes.log(0))
        assert not [line for line in (run / "metrics.jsonl").read_text().splitlines() if not json.loads(line)]


def test_a_folder_that_is_not_shared_is_told_before_training(sums_data, shared):
    with Nodes(2, shared) as nodes:
        start(nodes, sums_data, hides=nodes.folder / "runs")
        assert exit_code(nodes, 200) == 1
        check_folder_is_told(nodes.log(0), nodes.folder / "runs" / "run")


@pytest.mark.parametrize("flags, code, said", [((), 0, "step=3/3"), (("--lr", "-1"), 2, "--lr")])
def test_a_submitted_job_trains_in_the_cluster_and_its_output_and_outcome_come_back(
    flags, code, said, sums_data, shared
):
    with Nodes(2, shared) as nodes:
        run, files = copy_data(sums_data, nodes.folder)
        at = COMMON.index("--nproc-per-node")  # which the script gives
        job = replace_flags([*COMMON[:at], *COMMON[at + 2 :], *files, "--save", "runs/run"], [*flags])
        submit = [str(SUBMIT), "--address", "http://127.0.0.1:8265", "--folder", str(nodes.folder)]
        submit += ["--nnodes", "2", "--nproc-per-node", "1", "--", *job]
        start_cluster(nodes, submit, PYTHON=sys.executable, NODE_JOB_SERVER="true")
        assert (exit_code(nodes, 300) == 0) is (code == 0), nodes.log(0)
        log = nodes.log(0)
        assert said in log and (code == 0 or f"exit code {code}" in log), log
        assert (run / "metrics.jsonl").exists() is (code == 0)
        if code == 0:
            rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            assert [row["step"] for row in rows] == [1, 2, 3]


def wait_for_steps(run: Path, number: int, nodes: Nodes) -> None:
    deadline = time.monotonic() + 200
    while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_text().count("\n") < number:
        assert time.monotonic() < deadline, nodes.log(0)
        time.sleep(0.2)


def check_folder_is_told(log: str, run: Path) -> None:
    """Assert that the job has named the node that does not see its run folder, and has left none behind."""
    told = rf"FolderNotShared: --save \({run}\): node node[01] \(rank [01]\) does not see in {run} what the driver"
    assert re.search(told, log) and "step 1" not in log, log
    assert not run.exists()
