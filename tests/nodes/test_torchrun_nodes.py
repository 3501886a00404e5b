"""A job on two nodes under torchrun names a node that dies, a link that is cut, and a folder that is not shared.

    pytest tests/nodes -m nightly

The nodes are namespaces of this machine. No interface is named: each rank chooses it."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.jobs import COMMON, replace_flags
from tests.nodes.namespaces import Nodes, address
from tests.nodes.test_ray_nodes import check_folder_is_told, copy_data, wait_for_steps

pytestmark = pytest.mark.timeout(400)
TORCHRUN = ("--nproc-per-node", "1", "--rdzv-backend", "c10d")


def start(
    nodes: Nodes,
    data: Path,
    *flags: str,
    hides: Path | None = None,
    torchrun: tuple[str, ...] = (),
) -> tuple[Path, list[subprocess.Popen]]:
    """Start torchrun on all nodes. Returns the run folder and torchrun's processes.

    Args:
        hides: a folder that node 1 does not see.
        torchrun: torchrun's flags about nodes and restarts. Default: as many nodes as there are."""
    run, files = copy_data(data, nodes.folder)
    arguments = replace_flags([*COMMON, *files, "--save", str(run)], [*flags])
    command = [*TORCHRUN, *(torchrun or ("--nnodes", str(nodes.number))), "-m", "megarl.train", *arguments]
    secret = {"MEGARL_JOB_SECRET": secrets.token_hex(32)}
    (nodes.folder / "torchrun.json").write_text(json.dumps([command, secret]))
    hidden = [{"NODE_HIDES": str(hides or "") if node == 1 else ""} for node in range(nodes.number)]
    return run, [start_node(nodes, node, **env) for node, env in enumerate(hidden)]


def start_node(nodes: Nodes, node: int, **env: str) -> subprocess.Popen:
    """Start torchrun on one node, as `start` did or will do on all.

    SKIPPED_PIDS=n in `env` gives torchrun a process id that is larger by n: it names itself by address and id, and a
    new namespace counts from 1 again."""
    command, secret = json.loads((nodes.folder / "torchrun.json").read_text())
    where = ["--rdzv-endpoint", f"{address(0)}:29500", "--local-addr", address(node)]
    # below a shell: nothing inside a process namespace can kill its first process
    shell = ["bash", "-c", 'for i in $(seq ${SKIPPED_PIDS:-0}); do true & done; "$@"; exit $?', "torchrun"]
    torchrun = [*shell, sys.executable, "-m", "megarl.runtime.torchrun_agent", *where, *command]
    return nodes.start(node, torchrun, **secret, **env)


def logs(nodes: Nodes) -> str:
    """Return the output of all nodes: torchrun decides on which of them rank 0 and the driver are."""
    return "".join(nodes.log(node) for node in range(nodes.number))


def node_of_driver(nodes: Nodes) -> int:
    """Return the number of the node on which the driver runs."""
    for node in range(2):
        for pid in nodes.pids(node):
            if b"-m\0megarl.trainer\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return node
    raise AssertionError(logs(nodes))


@pytest.mark.parametrize("how", ["kill", "cut"])
def test_a_node_that_is_lost_is_named_with_its_rank(sums_data, shared, how):
    with Nodes(2, shared) as nodes:
        run, processes = start(nodes, sums_data, "--train-iters", "1000")
        wait_for_steps(run, 3, nodes)
        survivor = node_of_driver(nodes)
        lost = 1 - survivor
        nodes.kill(lost) if how == "kill" else nodes.cut(lost)
        begun, limit_s = time.monotonic(), 15
        named = rf"\[driver\] node node{lost} was lost, with rank [01]: actor"
        while not re.search(named, nodes.log(survivor)):
            assert time.monotonic() - begun < limit_s, logs(nodes)
            time.sleep(0.1)
        print(f"{how}: named after {time.monotonic() - begun:.1f} s")
        processes[lost].wait(limit_s + 3 - (time.monotonic() - begun))
        print(f"{how}: the lost node is empty after {time.monotonic() - begun:.1f} s")
        assert nodes.pids(lost) == []
        assert processes[survivor].wait(60) != 0
        print(f"{how}: all is over after {time.monotonic() - begun:.1f} s")
        text = nodes.log(survivor)
        # torchrun has its own traceback at the end
        assert text.count("[driver]") == 1 and "update failed" not in text, text
        assert "Traceback" not in text.split("torch/distributed/elastic")[0], text
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert steps == [*range(1, len(steps) + 1)]


def test_a_folder_that_is_not_shared_is_told_before_training(sums_data, shared):
    with Nodes(2, shared) as nodes:
        _, processes = start(nodes, sums_data, hides=nodes.folder / "runs")
        assert 0 not in [process.wait(200) for process in processes]
        check_folder_is_told(logs(nodes), nodes.folder / "runs" / "run")
