"""`python -m megarl.train @recipe.args [flags]` under torchrun: every rank serves, rank 0 also starts the driver.

    torchrun --nproc-per-node 2 -m megarl.train @configs/quickstart_grpo.args
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from megarl.algorithms import REGISTRY
from megarl.config.check import check_job
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.schema import TrainConfig

InlineJob = Callable[..., None]
"""(executor, config, inputs, world_size)."""


def main(argv: list[str], driver: str = "megarl.driver", inline_job: InlineJob | None = None, new_run: bool = True) -> int:
    """One rank's life. Returns the exit code.

    Args:
        driver: module that rank 0 starts as the driver process.
        inline_job: what --executor inline runs instead; default: training.
        new_run: --save must be free.
    """
    keep_checkout_off_path()
    rank = int(os.environ.get("RANK", "0"))
    try:
        config = load_config(argv, REGISTRY)
        if config.placement.executor == "inline":
            return run_inline(config, inline_job, new_run)
        if "RANK" not in os.environ:
            sys.stderr.write("megarl.train runs on the ranks that torchrun starts: torchrun --nproc-per-node N -m megarl.train ..., or "
                             "megarl train ..., which does it for you\n")
            return 2
        if rank == 0:  # torchrun's own count may not suit the job; only here, as others may come when the run has begun
            check_job(config, int(os.environ["WORLD_SIZE"]), new_run)
    except ConfigError as error:
        if rank == 0:
            sys.stderr.write(f"{error}\n")
        return 2
    return work(config, argv, rank, driver)


def keep_checkout_off_path() -> None:
    """`-m` puts the working directory on sys.path; in a checkout of ours vLLM would then take our folder triton_kernels/ for
    OpenAI's package of that name."""
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.path[:] = [p for p in sys.path if not os.path.isdir(os.path.join(p or os.getcwd(), "triton_kernels", ""))
                   or os.path.basename(p) == "site-packages"]


def work(config: TrainConfig, argv: list[str], rank: int, driver_module: str) -> int:
    """Start the driver on rank 0 (it checks the job while this process imports), join the world, serve."""
    from megarl.driver.torchrun import start_driver

    from megarl.workers.process import end_on_signals, keep_freed_memory, quiet_libraries

    end_on_signals()
    keep_freed_memory()
    driver = start_driver(argv, module=driver_module) if rank == 0 else None
    quiet_libraries()
    from megarl.workers.mailbox import connect
    from megarl.workers.serve import serve
    from megarl.workers.worker import build_roles, join_world

    join_world(config.placement.call_timeout_s)
    return serve(lambda: build_roles(config, int(os.environ["WORLD_SIZE"])), rank, connect(), driver)


def run_inline(config: TrainConfig, job: InlineJob | None = None, new_run: bool = True) -> int:
    """Driver and the only rank in one process: a debugger stands where the error is."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    from megarl.workers.process import quiet_libraries

    quiet_libraries()
    from megarl.driver.__main__ import train_job
    from megarl.driver.inline import InlineExecutor
    from megarl.driver.preflight import read_inputs
    try:
        inputs = read_inputs(config, 1, new_run)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    from megarl.workers.worker import build_roles, join_world

    join_world(config.placement.call_timeout_s)
    (job or train_job)(InlineExecutor(build_roles(config, world_size=1)), config, inputs, 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
