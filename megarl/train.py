"""Run one rank of a training job under torchrun: every rank serves the driver, and rank 0 also starts it.

torchrun --nproc-per-node 2 -m megarl.train @configs/quickstart_grpo.args
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from megarl.algorithms import REGISTRY
from megarl.checks.job import check_everything
from megarl.config.check import on_started_ranks
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.roles import trains_in_fp32
from megarl.config.schema import TrainConfig
from megarl.runtime import start_verdict
from megarl.runtime.network import InterfaceError, choose_interface
from megarl.runtime.process import (
    DRIVER_PID,
    end_on_signals,
    keep_checkout_off_path,
    open_standard_streams,
    quiet_libraries,
)
from megarl.runtime.signing import SecretError, check_secret
from megarl.trainer.announce import Say, line_on, starting_text
from megarl.trainer.executors import has_rank_processes, open_executor
from megarl.trainer.restarts import note_launcher, of_this_attempt

InProcessJob = Callable[..., None]
"""(executor, config, inputs, world_size)."""


def main(
    argv: list[str],
    driver: str = "megarl.trainer",
    in_process_job: InProcessJob | None = None,
    new_run: bool = True,
    load: Callable[[list[str]], TrainConfig] = lambda argv: load_config(argv, REGISTRY),
    say: Say = line_on(),
) -> int:
    """Run one rank of a job until the job ends, and return the exit code; 2 for a configuration that cannot
    start.

    Args:
        driver: module that rank 0 starts as the driver process.
        in_process_job: what an executor without rank processes runs instead; default: training.
        new_run: --save must be free.
        load: makes the configuration from `argv`.
        say: shows the line that says what an executor without rank processes starts.
    """
    open_standard_streams()
    if "RANK" in os.environ:
        # early, because torchrun passes a Ctrl-C on to this process, which has no message of its own
        end_on_signals()
    keep_checkout_off_path()
    rank = int(os.environ.get("RANK", "0"))
    is_first = os.environ.get("RANK") == "0" and DRIVER_PID not in os.environ
    try:
        config = load(argv)
        if not has_rank_processes(config):
            return run_in_process(config, in_process_job, new_run, argv, say)
        if "RANK" not in os.environ:
            sys.stderr.write(
                "megarl.train runs on the ranks that torchrun starts: torchrun --nproc-per-node N -m "
                "megarl.train ..., or megarl train ..., which does it for you\n"
            )
            return 2
        if is_first:  # torchrun's own count may not suit the job; others may come when the run has begun
            note_launcher()
            ranks, nodes = int(os.environ["WORLD_SIZE"]), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
            check_everything(
                on_started_ranks(of_this_attempt(config) if new_run else config, ranks, nodes),
                ranks,
                new_run,
                int(os.environ.get("LOCAL_WORLD_SIZE", ranks)),
            )
        check_secret()
        choose_interface()
    except (ConfigError, SecretError, InterfaceError) as error:
        start_verdict.tell(str(error))
        start_verdict.refuse(str(error))
        return 2
    except BaseException as error:
        start_verdict.refuse(f"{type(error).__name__}: {error}")
        raise
    if is_first:
        start_verdict.allow()
    return work(config, argv, rank, driver)


def work(config: TrainConfig, argv: list[str], rank: int, driver_module: str) -> int:
    """Join torch's process group, run the driver's calls until the job ends, and end this process with the
    exit code; with --profile return the code. Rank 0 also starts the driver under torchrun."""
    from megarl.runtime.process import compute_fp32_exactly, end_process, end_with_parent, keep_freed_memory
    from megarl.runtime.torchrun import start_driver

    keep_freed_memory()
    if trains_in_fp32(config):
        compute_fp32_exactly()
    if driver_pid := os.environ.get(DRIVER_PID):
        end_with_parent(int(driver_pid))
    driver = start_driver(argv, module=driver_module) if rank == 0 and not driver_pid else None
    quiet_libraries()
    from megarl.runtime.mailbox import connect, has_own_store
    from megarl.runtime.node_watch import has_node_watch, start_node_watch_process
    from megarl.runtime.worker_loop import answer_health, fail_to_start, serve
    from megarl.workers.worker import build_roles, join_world

    if rank and not driver_pid and not start_verdict.await_start(config.placement.call_timeout_s):
        end_process(2)
    health = answer_health(rank) if has_own_store() else None
    try:
        with start_verdict.ending_if_refused():
            if health is not None and has_node_watch():
                start_node_watch_process(connect())
            join_world(config.placement.call_timeout_s)
        if health is None and has_node_watch():  # rank 0 hosts the store, from here on
            start_node_watch_process(connect())
    except Exception as error:  # process boundary
        fail_to_start(error, rank)
    world_size = int(os.environ["WORLD_SIZE"])
    code = serve(lambda context: build_roles(config, world_size, context), rank, connect(), driver, health)
    if config.profile.profile is None:  # profilers may write their files when a process unloads them
        end_process(code)
    return code


def run_in_process(
    config: TrainConfig,
    job: InProcessJob | None = None,
    new_run: bool = True,
    argv: Sequence[str] = (),
    say: Say = line_on(),
) -> int:
    """Run the job with this process as its driver, on an executor that starts no rank processes, and return
    the exit code.

    Args:
        argv: command line of the job, for the command that resumes it.
        say: shows the line that says what is started."""
    quiet_libraries()
    from megarl.runtime.end_message import EndNotes
    from megarl.runtime.shutdown import run_job_in_process
    from megarl.trainer.__main__ import train_job
    from megarl.trainer.preflight import read_inputs
    from megarl.trainer.resume_command import end_notes

    world_size = config.placement.world_size
    say(starting_text(config, world_size))
    try:
        inputs = read_inputs(config, world_size, new_run)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return run_job_in_process(
        lambda executor: (job or train_job)(executor, config, inputs, world_size),
        lambda: open_executor(config, world_size),
        end_notes(config, ["megarl", "train"], argv) if new_run else EndNotes(),
    )


if (
    __name__ == "__mp_main__"
):  # multiprocessing imports a rank's main module first, in the processes that vLLM starts for an engine
    quiet_libraries()
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
