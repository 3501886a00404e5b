"""Start the ranks of `megarl train` as children of this process, which is the driver.

launch            the job: ranks, executor, loop, shutdown
launch_ranks      ranks that need no driver (`megarl convert`)
drive             the job of ranks that torchrun has started, in the driver process beside rank 0
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from megarl.config.check import fitting_nodes, on_nodes, on_started_ranks
from megarl.config.mesh import hosting_ranks
from megarl.config.schema import TrainConfig
from megarl.rollout.engine_memory import sweep_shared_memory
from megarl.runtime.end_message import EndNotes
from megarl.runtime.process import (
    NUM_NODES,
    exit_on_signals,
    keep_checkout_off_path,
    quiet_libraries,
    world_size_from_env,
)
from megarl.runtime.shutdown import last_failure, received_signal, run_job
from megarl.runtime.torchrun import run_driver
from megarl.trainer.announce import Say, line_on, starting_text
from megarl.trainer.executors import interfaces_of, job_ranks, rank_description
from megarl.trainer.restarts import continued, where_it_goes_on
from megarl.trainer.resume_command import end_notes, torchrun_command

if TYPE_CHECKING:
    from megarl.runtime.executor import Executor
    from megarl.runtime.ray_ranks import RayRanks
    from megarl.runtime.store_executor import StoreExecutor
    from megarl.trainer.preflight import Inputs

logger = logging.getLogger(__name__)
Job = Callable[["Executor", TrainConfig, Mapping[str, "Inputs"], int], None]
"""Function of a job: (executor, config, inputs, world_size)."""


def launch(
    config: TrainConfig,
    argv: list[str],
    job: Job,
    module: str = "megarl.train",
    new_run: bool = True,
    say: Say = line_on(),
    is_checked: bool = False,
) -> int:
    """Run `job` on ranks that this process starts as `python -m module argv`. Returns the exit code of the
    last attempt.

    After a failure the job is restarted, up to --max-restarts times. Returns the exit code of the last
    attempt, as `run_job`.

    Args:
        new_run: whether --save must be free.
        say: shows the line that says what is started.
        is_checked: whether another machine has tried the inputs."""
    exit_on_signals(signal.SIGINT, signal.SIGTERM)  # there is nothing to clean up yet
    _prepare_process()
    attempt, before = 0, None
    say(starting_text(config, config.placement.world_size))
    code = _attempt(config, argv, job, module, new_run, attempt, is_checked)
    while code == 1 and new_run and attempt < config.checkpoint.max_restarts:
        if (signum := received_signal()) is not None:
            return 128 + signum
        attempt, config = attempt + 1, continued(config)
        failure = last_failure(), where_it_goes_on(config)
        again = " It was the same failure as before, at the same step, and nothing was saved since."
        sys.stderr.write(
            f"[driver] restart {attempt} of {config.checkpoint.max_restarts}, {failure[1]}."
            f"{again if failure == before else ''}\n"
        )
        say(starting_text(config, config.placement.world_size))
        before, code = failure, _attempt(config, argv, job, module, new_run, attempt, is_checked)
    return code


def _attempt(
    config: TrainConfig, argv: list[str], job: Job, module: str, new_run: bool, attempt: int, is_checked: bool
) -> int:
    """Run one attempt of the job, and return its exit code as `run_job` does.

    Later attempts start the ranks with the same arguments: only the driver's --load differs."""
    placement = config.placement
    notes = end_notes(config, ["megarl", "train"], argv) if new_run else EndNotes()
    processes = job_ranks(config, argv, placement.world_size, module, attempt)
    started = config

    def start() -> StoreExecutor:
        nonlocal started
        if placement.elastic_min_nodes is not None:
            count = cast("RayRanks", processes).place(fitting_nodes(config))
            started = on_nodes(config, count)
            if count < placement.nnodes:
                sys.stderr.write(
                    f"[driver] the cluster has no room for --nnodes ({placement.nnodes}): this attempt runs on "
                    f"{count} (--elastic-min-nodes {placement.elastic_min_nodes})\n"
                )
        ranks = hosting_ranks(started, started.placement.world_size)
        return processes.start(ranks, placement.call_timeout_s, interfaces_of(ranks))

    def body(executor: Executor) -> None:
        _body(job, started, started.placement.world_size, new_run, is_checked)(executor)

    return run_job(body, start, processes, notes)


def drive(
    config: TrainConfig,
    job: Job,
    new_run: bool = True,
    argv: Sequence[str] = (),
    say: Say = line_on(),
) -> int:
    """Run `job` in the driver process that rank 0 has started. Returns its exit code, as `run_job`.

    Args:
        argv: command line of the job, for the command that resumes it.
        say: shows the line that says what is started."""
    notes = end_notes(config, torchrun_command(argv), argv) if new_run else EndNotes()
    world_size = world_size_from_env()
    # resolved.args repeats the run
    config = on_started_ranks(config, world_size, int(os.environ.get(NUM_NODES, "1")))
    say(starting_text(config, world_size))
    ranks = hosting_ranks(config, world_size)
    timeout_s, body = config.placement.call_timeout_s, _body(job, config, world_size, new_run)
    return run_driver(body, ranks, timeout_s, interfaces_of(ranks), notes, rank_description(ranks))


def _body(
    job: Job, config: TrainConfig, world_size: int, new_run: bool, is_checked: bool = False
) -> Callable[[Executor], None]:
    from megarl.trainer.preflight import read_inputs

    return lambda executor: job(
        executor, config, read_inputs(config, world_size, new_run, is_checked), world_size
    )


def launch_ranks(argv: list[str], world_size: int, module: str) -> int:
    """Run `python -m module argv` as ranks, wait for them, and return an exit code: 0, 1 or 130.

    The ranks report their own errors. This process reports ranks that are killed.

    Returns: 0 for success; 1 if a rank failed, after which the other ranks are ended; 130 after Ctrl-C."""
    _prepare_process()
    from megarl.runtime.local_ranks import LocalRanks
    from megarl.runtime.rank_processes import RankDied, undisturbed

    processes = LocalRanks(argv, world_size, module, tidy_up=sweep_shared_memory)
    deaths: list[RankDied] = []
    processes.report_deaths(deaths.append)
    try:
        processes.start_ranks()
        while processes.are_running() and not deaths:
            time.sleep(0.05)
    finally:
        with undisturbed(is_interrupt=True):
            processes.end(0.0)
    for death in deaths[:1]:
        if death.is_kill:
            logger.error(death)
    return 1 if deaths else 0


def _prepare_process() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default too
    keep_checkout_off_path()
    quiet_libraries()
