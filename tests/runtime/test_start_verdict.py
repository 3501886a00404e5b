"""A job that cannot start ends on every node under torchrun, with the reason, and not only on that of rank 0.

    pytest tests/runtime/test_start_verdict.py                  a static rendezvous
    pytest tests/runtime/test_start_verdict.py -m nightly       c10d's, other secrets, a job that starts

The nodes are two agents of torchrun on this machine."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import time

import pytest

from megarl.runtime import start_verdict
from tests.e2e.jobs import COMMON, replace_flags
from tests.launch import preloaded_python

MISSING = ("--model", "/nonexistent/model")
STATIC = ("--master-addr", "127.0.0.1", "--master-port", "{port}")
C10D = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:{port}", "--rdzv-id", "job")


def run_on_two_nodes(data, folder, rendezvous, *flags, given=None, timeout=90, ranks=1):
    """The output of both agents, after both have ended by themselves.

    Args:
        given: secret of each node. Default: one for both.
        ranks: of each node."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    files = (
        "--model",
        str(data / "model"),
        "--train-data",
        str(data / "train.jsonl"),
        "--save",
        str(folder / "run"),
    )
    arguments = replace_flags([*COMMON, *files], ["--nnodes", "2", "--nproc-per-node", str(ranks), *flags])
    given = given or [secrets.token_hex(32)] * 2
    agents = []
    for node in range(2):
        where = [word.format(port=port) for word in rendezvous]
        if rendezvous is STATIC:
            where += ["--node-rank", str(node)]
        command = [
            preloaded_python(),
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            str(ranks),
            *where,
        ]
        agents.append(
            subprocess.Popen(
                [*command, "-m", "megarl.train", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=dict(os.environ, PYTHONSAFEPATH="1", MEGARL_JOB_SECRET=given[node]),
            )
        )
    try:
        return [agent.communicate(timeout=timeout)[0] for agent in agents], [
            agent.returncode for agent in agents
        ]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


def check_told(outputs):
    """Each node has the reason once, the node that did not find it with the name of the other; both ranks end with
    2."""
    for output in outputs:
        assert output.count("--model (/nonexistent/model): must be a Hugging Face model folder") == 1, output
        assert re.search(r"exitcode *: 2", output) and "[driver]" not in output, output
    assert sorted(output.count(f"node {socket.gethostname()}: ") for output in outputs) == [0, 1]


def test_every_node_hears_why_the_job_cannot_start(sums_data, tmp_path):
    outputs, codes = run_on_two_nodes(sums_data, tmp_path, STATIC, *MISSING)
    check_told(outputs)
    assert codes == [1, 1] and not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_with_a_dynamic_rendezvous_too(sums_data, tmp_path):
    check_told(run_on_two_nodes(sums_data, tmp_path, C10D, *MISSING)[0])


@pytest.mark.nightly
def test_another_secret_is_told(sums_data, tmp_path):
    given = [secrets.token_hex(32) for _ in range(2)]
    outputs, _ = run_on_two_nodes(sums_data, tmp_path, STATIC, *MISSING, given=given)
    assert "--model (/nonexistent/model)" in outputs[0]
    assert "MEGARL_JOB_SECRET is not the same on all nodes" in outputs[1]
    assert "/nonexistent" not in outputs[1].split("torch/distributed")[0]


@pytest.mark.nightly
def test_a_missing_secret_of_rank_0_is_told(sums_data, tmp_path):
    outputs, _ = run_on_two_nodes(sums_data, tmp_path, STATIC, given=["short", secrets.token_hex(32)])
    assert "MEGARL_JOB_SECRET (variable, 5 characters)" in outputs[0]
    assert "MEGARL_JOB_SECRET is not the same on all nodes" in outputs[1]


@pytest.mark.nightly
def test_an_error_of_the_flags_is_said_once_per_node_without_waiting(sums_data, tmp_path):
    """Every rank finds this error by itself, so no node may wait for another one to hear it."""
    begin = time.monotonic()
    outputs, codes = run_on_two_nodes(sums_data, tmp_path, C10D, "--lr", "-1", ranks=2)
    assert codes == [1, 1] and [output.count("--lr (-1): must be at least 0") for output in outputs] == [1, 1]
    assert time.monotonic() - begin < start_verdict._HEARD_S


@pytest.mark.nightly
def test_a_node_that_cannot_start_ends_the_others_that_can(sums_data, tmp_path):
    given = [secrets.token_hex(32) for _ in range(2)]
    outputs, codes = run_on_two_nodes(sums_data, tmp_path, C10D, given=given)
    assert codes == [1, 1]
    for output in outputs:
        assert output.count("MEGARL_JOB_SECRET is not the same on all nodes") == 1, output
        assert re.search(r"exitcode *: 2", output)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rendezvous", [STATIC, C10D], ids=["static", "c10d"])
def test_a_job_that_can_start_does(sums_data, tmp_path, rendezvous):
    outputs, codes = run_on_two_nodes(sums_data, tmp_path, rendezvous, timeout=240)
    assert codes == [0, 0] and sum("step=3/3" in output for output in outputs) == 1, outputs
