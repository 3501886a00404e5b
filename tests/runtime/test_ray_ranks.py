"""A rank of a Ray job that leaves with exit code 0, without a Ray. `pytest tests/runtime/test_ray_ranks.py`

With Ray: test_contract.py."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megarl.runtime.ray_node import DIED, RayNode

RANK_1_LEAVES_FIRST = """
import os, pathlib, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
while rank == 0 and not (folder / "end_of_1").exists():
    time.sleep(0.05)
time.sleep(1.0 if rank == 0 else 0.0)
(folder / f"end_of_{rank}").touch()
"""


@pytest.mark.timeout(120)
def test_a_node_tells_of_a_rank_that_leaves_and_lets_the_others_end(tmp_path):
    """The job may be ending, with ranks that still run their exit handlers. Only the driver knows that."""
    (tmp_path / "leaves_first.py").write_text(RANK_1_LEAVES_FIRST)
    node, env = RayNode(), {"PYTHONPATH": str(tmp_path)}
    node.start("leaves_first", [str(tmp_path)], env, range(2), os.getcwd(), None, lambda: None)
    try:
        assert sorted(node.next_report() for _ in range(2)) == [(DIED, 0, 0), (DIED, 1, 0)]
        assert (tmp_path / "end_of_0").exists()
    finally:
        node.kill()


@pytest.mark.parametrize("is_ending", [False, True])
def test_a_rank_that_leaves_is_a_failure_unless_the_job_ends(monkeypatch, is_ending):
    ray_ranks = pytest.importorskip("megarl.runtime.ray_ranks")
    reports = [(DIED, 1, 0), (DIED, 0, -9), None]
    monkeypatch.setattr(ray_ranks.ray, "get", lambda reference: reference)
    ranks = ray_ranks.RayRanks([], 1, 2, describe_rank=lambda rank: f"{rank}: actor")
    ranks._names = ["node0"]
    ranks._nodes = [SimpleNamespace(next_report=SimpleNamespace(remote=lambda: reports.pop(0)))]
    failures: list[Exception] = []
    executor = SimpleNamespace(is_ending=is_ending, fail=failures.append, where=lambda: "at step 7")
    ranks._watch(0, executor)
    killed = "[rank 0: actor] was killed by SIGKILL."
    left = "[rank 1: actor] ended with exit code 0; stderr may say why. The job was at step 7."
    told = [str(failure) for failure in failures]
    assert told[-1].startswith(killed) and told[:-1] == ([] if is_ending else [left])


TOKEN = """
import os, sys, ray
from megarl.runtime.ray_ranks import join
ray.init = lambda **how: print(how["address"], os.environ.get("RAY_AUTH_MODE"))
join(sys.argv[1])
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "has_token, mode, used", [(True, None, "token"), (True, "disabled", "disabled"), (False, None, "None")]
)
def test_the_token_of_this_user_is_used_for_an_address_too(tmp_path, has_token, mode, used):
    if has_token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"HOME": str(tmp_path)} | ({} if mode is None else {"RAY_AUTH_MODE": mode})
    command = [sys.executable, "-c", TOKEN, "10.0.0.1:6379"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout == f"10.0.0.1:6379 {used}\n", done.stderr
