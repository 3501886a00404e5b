"""A driver on the head of a Ray cluster, which has no GPU, lets a node that has some check the job and try its
inputs.

    pytest tests/nodes -m nightly

The nodes are namespaces of this machine; node 1 declares a GPU that nothing uses."""

from __future__ import annotations

import json
import secrets
import shlex
import sys
from pathlib import Path

import pytest

from tests.e2e.jobs import COMMON, replace_flags
from tests.nodes.namespaces import Nodes, address
from tests.nodes.test_ray_nodes import RAY_NODE, copy_data, exit_code

pytestmark = pytest.mark.timeout(400)
REWARD = """import only_on_node_1

def score(data_source, solution_str, ground_truth, extra_info):
    return only_on_node_1.score(solution_str)
"""


def run_on_head(nodes: Nodes, command: list[str], hides: Path, **env: str) -> int:
    """Run a command on node 0, which sees an empty folder in place of `hides`. Returns its exit code."""
    cluster = env | {
        "NODES": "2",
        "HEAD": address(0),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(24),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }
    node = ["bash", str(RAY_NODE), sys.executable]
    nodes.start(0, [*node, *command], **cluster, NODE_HIDES=str(hides))
    nodes.start(1, node, **cluster, NODE_GPUS="1")
    return exit_code(nodes, 300)


def test_a_worker_checks_and_tries_what_the_head_does_not_have(sums_data, shared):
    run, files = copy_data(sums_data, shared)
    package, reward = shared / "package", shared / "reward.py"
    package.mkdir()
    (package / "only_on_node_1.py").write_text("def score(text):\n    return float(len(text) % 2)\n")
    reward.write_text(REWARD)
    own = ["--save", str(run), "--executor", "ray", "--nproc-per-node", "1"]
    flags = [*own, "--reward-function", f"{reward}:score"]
    arguments = replace_flags([*COMMON, *files], flags)
    cli = f"{shlex.quote(sys.executable)} -m megarl.cli"
    both = ["bash", "-c", f'{cli} check "$@" && {cli} train "$@"', "both", *arguments]
    with Nodes(2, shared) as nodes:
        code = run_on_head(nodes, both, package, PYTHONPATH=str(package))
        log = nodes.log(0)
    assert code == 0, log
    assert log.count("checked on node1: this machine has no GPU") == 2, log
    assert log.startswith("ok") or "\nok" in log, log
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [
        1,
        2,
        3,
    ]


OWN_LOOP = """import sys

import megarl

with megarl.GRPOTrainer(megarl.load_config(*sys.argv[1:])) as trainer:
    for step in trainer.steps():
        trainer.update(trainer.rollout())
"""


@pytest.mark.parametrize("module", ["only_on_node_1", "there_is_none"])
def test_a_program_of_the_users_own_lets_a_worker_check_too(sums_data, shared, module):
    run, files = copy_data(sums_data, shared)
    package, reward, program = shared / "package", shared / "reward.py", shared / "own loop.py"
    package.mkdir()
    (package / "only_on_node_1.py").write_text("def score(text):\n    return float(len(text) % 2)\n")
    reward.write_text(REWARD.replace("only_on_node_1", module))
    program.write_text(OWN_LOOP)
    own = ["--save", str(run), "--executor", "ray", "--nproc-per-node", "1"]
    arguments = replace_flags([*COMMON, *files], [*own, "--reward-function", f"{reward}:score"])
    with Nodes(2, shared) as nodes:
        code = run_on_head(
            nodes, [sys.executable, str(program), *arguments], package, PYTHONPATH=str(package)
        )
        log = nodes.log(0)
    if module == "only_on_node_1":
        assert code == 0 and (run / "metrics.jsonl").read_text().count("\n") == 3, log
    else:
        assert code == 1 and "ConfigError" in log and "there_is_none" in log, log
        assert "[checked on node1]" in log and not run.exists(), log


def test_an_error_that_a_worker_finds_is_the_answer(sums_data, shared):
    run, files = copy_data(sums_data, shared)
    missing = shared / "package"
    missing.mkdir()
    reward = shared / "reward.py"
    reward.write_text(REWARD.replace("only_on_node_1", "there_is_none"))
    own = ["--save", str(run), "--executor", "ray", "--nproc-per-node", "1"]
    arguments = replace_flags([*COMMON, *files], [*own, "--reward-function", f"{reward}:score"])
    with Nodes(2, shared) as nodes:
        code = run_on_head(nodes, [sys.executable, "-m", "megarl.cli", "train", *arguments], missing)
        log = nodes.log(0)
    assert code == 2 and "there_is_none" in log and "step 1" not in log, log
    assert not run.exists()
