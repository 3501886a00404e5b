"""Run the driver process beside rank 0 under torchrun, from its start to its exit code.

    torchrun -> rank 0 -> start_driver -> run_driver(main, ...)  the driver: connect, run, shut down
             -> rank 0, 1, ... -> serve(roles, ...)              the workers

An error is reported once (`shutdown.py`), and then everything ends: the driver exits, then rank 0, then
torchrun ends all others. Importing this module does not import torch, so the driver starts before rank 0 has
imported it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from megarl.runtime.end_message import EndNotes
from megarl.runtime.shutdown import run_job
from megarl.runtime.signing import JOB_SECRET, job_secret
from megarl.runtime.network import own_address
from megarl.runtime.node_watch import has_node_watch
from megarl.runtime.process import NUM_NODES, end_on_signals, end_with_parent, store_prefix, without_rank

if TYPE_CHECKING:
    from megarl.runtime.store_executor import StoreExecutor


def start_driver(argv: list[str], module: str = "megarl.trainer") -> subprocess.Popen[bytes]:
    """Start the driver process `python -P -m module argv` beside rank 0, and return it.

    Call this on rank 0's main thread and pass the result to `serve`. The driver's environment describes the
    job, without the variables that would make the driver a rank. From here on this process lives no longer
    than the driver. If the driver fails, this process exits at once with the driver's code.
    """
    child_env = without_rank(os.environ) | {
        "PYTHONSAFEPATH": "1",
        "MEGARL_STORE": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        "MEGARL_STORE_PREFIX": store_prefix(),
        "MEGARL_WORLD_SIZE": os.environ["WORLD_SIZE"],
        "MEGARL_RANK_0_PID": str(os.getpid()),
        NUM_NODES: os.environ.get("GROUP_WORLD_SIZE", "1"),
        JOB_SECRET: job_secret(),
    }
    # when the store goes away the driver reports it itself
    child_env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    driver = subprocess.Popen([sys.executable, "-P", "-m", module, *argv], env=child_env)
    threading.Thread(target=_watch_driver, args=(driver,), name="watch_driver", daemon=True).start()
    return driver


def _watch_driver(driver: subprocess.Popen[bytes]) -> None:
    code = driver.wait()
    if code in (-signal.SIGINT, -signal.SIGTERM):  # the signal came before the driver could handle it
        os._exit(128 - code)
    if code < 0:
        sys.stderr.write(f"[rank 0] the driver process was killed by signal {-code}; ending the job\n")
        sys.stderr.flush()
    if code != 0:
        os._exit(code if code > 0 else 1)


def run_driver(
    main: Callable[[StoreExecutor], object],
    ranks: dict[str, list[int]],
    call_timeout_s: float,
    interfaces: Mapping[str, type] | None = None,
    notes: EndNotes = EndNotes(),
    describe_rank: Callable[[int], str] = str,
) -> int:
    """Run `main(executor)` in the driver process that `start_driver` started, end the ranks, and return the
    exit code.

    Returns the exit code, as `run_job`.

    Args:
        interfaces: as in StoreExecutor.
        notes: as in `run_job`.
        describe_rank: describes a rank of a node that is lost, for example "1: actor, critic"."""
    end_on_signals()
    end_with_parent(int(os.environ["MEGARL_RANK_0_PID"]))
    # torch: cleanup cannot run if a signal interrupts this import
    from megarl.runtime.store_executor import Nodes, StoreExecutor

    def connect() -> StoreExecutor:
        if not has_node_watch():
            return StoreExecutor.from_env(ranks, call_timeout_s, interfaces)
        host, port = os.environ["MEGARL_STORE"].rsplit(":", 1)
        own = own_address({**os.environ, "MASTER_ADDR": host, "MASTER_PORT": port})
        nodes = Nodes(own, int(os.environ[NUM_NODES]))
        executor = StoreExecutor.from_env(ranks, call_timeout_s, interfaces, nodes)
        executor.watch_nodes(describe_rank)
        return executor

    return run_job(main, connect, notes=notes)
