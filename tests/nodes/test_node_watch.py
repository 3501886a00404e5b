"""A cut link between two nodes is noticed at both ends: the driver names the node, and the node ends itself.

The nodes are namespaces of this machine. No job runs in them, so this takes seconds; test_torchrun_nodes.py
cuts the link of a job."""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
import time
from pathlib import Path

import pytest

from megarl.runtime.signing import JOB_SECRET
from tests.nodes.namespaces import Nodes, address
from tests.runtime.test_node_watch import SCRIPT, SHORT, limits, until

pytestmark = pytest.mark.timeout(120)


def test_a_cut_link_is_noticed_at_both_ends():
    with tempfile.TemporaryDirectory(prefix="megarl-nodes-", dir="/var/tmp") as name:
        folder, env = Path(name), {JOB_SECRET: secrets.token_hex(32)}
        command = [sys.executable, "-P", str(SCRIPT)]
        with Nodes(2, folder) as nodes:
            nodes.start(0, [*command, "driver", name, address(0), *limits(SHORT)], **env)
            agent = nodes.start(1, [*command, "agent", name, "1", "60", *limits(SHORT)], **env)
            until((folder / "rank_1").exists, 20)
            time.sleep(2.0)  # the watch has signed in
            assert not (folder / "lost").exists() and agent.poll() is None
            nodes.cut(1)
            cut = time.time()
            until((folder / "lost").exists, SHORT.limit_s + 3)
            (lost,) = map(json.loads, (folder / "lost").read_text().splitlines())
            assert (lost["node"], lost["ranks"]) == ("node1", [1])
            assert "no sign of life for 3 s" in lost["reason"]
            assert 1.0 < lost["time"] - cut < SHORT.limit_s + 2
            # the rank holds the interpreter's lock all the time
            until(lambda: agent.poll() is not None, 6)
            assert nodes.pids(1) == []
            assert "does not reach the driver (10.78.0.1:" in nodes.log(1)
