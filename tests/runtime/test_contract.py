"""Every executor keeps the contract in executor_contract.py. `pytest tests/runtime/test_contract.py`

One job per set-up runs all checks; each is a test of its own, so that what is broken has a name."""

import socket
import sys
import threading

import pytest

from megarl.runtime.abort import ABORT
from megarl.runtime.inline_executor import InlineExecutor
from tests.runtime import executor_contract as contract
from tests.runtime.jobs import END_WITHIN_S, TORCHRUN, Job, preloaded
from tests.runtime.thread_executor import Agreement, ThreadExecutor

CHECKS = [check.__name__ for check in contract.CHECKS]
IN_PROCESS = [name for name in contract.FAILURES if name not in ("deadline", "death", "leaves")]


def inline() -> InlineExecutor:
    ranks = contract.ranks_of(1)
    return InlineExecutor(
        lambda context: contract.build_roles(context, ranks, lambda value: value), contract.INTERFACES
    )


def threads(world_size: int = 3) -> ThreadExecutor:
    ranks, agreement = contract.ranks_of(world_size), Agreement(world_size)
    return ThreadExecutor(
        lambda context: contract.build_roles(context, ranks, agreement.of_rank(context.rank)),
        ranks,
        world_size,
        contract.INTERFACES,
    )


def run_in_process(make) -> dict[str, str | None]:
    found = contract.run(make())
    ABORT.is_requested = False
    for name in IN_PROCESS:
        found[name] = contract.run_failure(executor := make(), name)
        executor.shutdown()
    return found


def run_job(
    folder, command: list[str], code: int, *arguments: str, processes: int = 1, **env: str
) -> dict[str, str | None]:
    job = Job(folder)
    try:
        whole = [*command, "contract_job", str(folder), *arguments]
        codes = [process.wait(200) for process in [job.start(whole, **env) for _ in range(processes)]]
        assert codes == [code] * processes, job.stderr()
        job.wait_until_gone(END_WITHIN_S)
        return job.seen("found.json")
    finally:
        job.end()


def run_on_two_nodes(folder) -> dict[str, str | None]:
    """Two torchruns of this machine take each other for different nodes, so there are two relays."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    return run_job(folder, [*command, "-m"], 1, processes=2, MEGARL_JOB_SECRET="s" * 64)


def run_on_own(folder, ends: tuple[str, ...], started_by: str = "") -> dict[str, str | None]:
    """Ranks that an executor starts itself: one job that ends well, and one for each of these failures."""
    return run_job(folder, [sys.executable, "-P", "-m"], 0, started_by, ",".join(ends))


ALL_ENDS = ("raises", "idle", "result_type", "deadline", "death", "leaves", "killed")
"""Failures after which an executor must have ended all processes that it has started."""
RUN = {
    "inline": lambda folder: run_in_process(inline),
    "threads": lambda folder: run_in_process(threads),
    "own_processes": lambda folder: run_on_own(folder, ("raises", "deadline", "death")),
    "own_processes_ends": lambda folder: run_on_own(folder, ALL_ENDS),
    "ray": lambda folder: run_on_own(folder, (), "ray"),
    "ray_ends": lambda folder: run_on_own(folder, ALL_ENDS, "ray"),
    "torchrun": lambda folder: run_job(folder, [*preloaded(TORCHRUN), "-m"], 1),
    "two_nodes": run_on_two_nodes,
}
ENDS = {
    "inline": ["shutdown", *IN_PROCESS],
    "threads": ["shutdown", *IN_PROCESS],
    "own_processes": ["shutdown", "raises", "deadline", "death"],
    "own_processes_ends": ["shutdown", *ALL_ENDS],
    "ray": ["shutdown"],
    "ray_ends": ["shutdown", *ALL_ENDS],
    "torchrun": ["raises"],
    "two_nodes": ["raises"],
}
MARKS = dict.fromkeys(("own_processes_ends", "ray_ends", "two_nodes"), pytest.mark.nightly)


@pytest.fixture(scope="module")
def found_by(tmp_path_factory):
    """A function: name of a set-up -> what its one job found."""
    found: dict[str, dict[str, str | None]] = {}

    def run(setup: str) -> dict[str, str | None]:
        if setup not in found:
            found[setup] = {}
            found[setup] = RUN[setup](tmp_path_factory.mktemp(setup))
        return found[setup]

    return run


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "setup, check",
    [
        pytest.param(setup, check, marks=MARKS.get(setup, ()))
        for setup in RUN
        for check in (*CHECKS, *ENDS[setup])
    ],
)
def test_the_contract(found_by, setup, check):
    found = found_by(setup)
    assert check in found, f"the job of {setup} did not get here"
    assert found[check] is None, found[check]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(setup, marks=MARKS.get(setup, ()))
        for setup in RUN
        if setup.startswith(("own_processes", "ray"))
    ],
)
def test_no_process_is_left_after_any_end(found_by, setup):
    found = found_by(setup)
    ends = {name: error for name, error in found.items() if name.startswith(("processes left", "end of"))}
    assert len(ends) >= len(ENDS[setup]) - 1 and not any(ends.values()), ends


def test_no_thread_is_left_after_a_shutdown():
    before = set(threading.enumerate())
    executor = threads(2)
    executor.shutdown()
    left = set(threading.enumerate()) - before
    assert not [thread.name for thread in left if thread.name.startswith("rank_")]
