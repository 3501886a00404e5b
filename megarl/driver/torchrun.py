"""The driver process under torchrun, from its first to its last line.

    torchrun -> rank 0 -> start_driver -> run_driver(main, ...)     the driver: connect, main(executor), shut down
             -> rank 0, 1, ... -> serve(roles, ...)                 the workers

Whatever fails is told once, by `run_driver`, and then everything ends: the driver exits, with it rank 0, with it (torchrun) all.
Importing this module does not import torch, so the driver starts before rank 0 has.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING

from megarl.driver.executor import at_step
from megarl.signed_pickle import JOB_SECRET, job_secret
from megarl.workers.process import end_on_signals, end_with_parent, store_prefix

if TYPE_CHECKING:
    from megarl.driver.store_executor import StoreExecutor

logger = logging.getLogger(__name__)
_UNWIND_S, _OVERTAKE_S, _DEATH_FIRST_S = 3.0, 1.0, 0.5
_signals: list[int] = []
_OF_A_RANK = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "RANK", "WORLD_SIZE", "MASTER_")
DRIVER_PID = "MEGARL_DRIVER_PID"
"""In the ranks that a driver has started itself: its process."""


def start_driver(argv: list[str], env: dict[str, str] | None = None, module: str = "megarl.driver") -> subprocess.Popen:
    """Start the driver beside rank 0: `python -P -m module argv`. Call it on rank 0's main thread; hand the result to `serve`.

    The driver finds the job in its environment and not the variables that would make it pass for a rank. From here on this process
    lives no longer than the driver does: it exits when the driver fails, with the driver's code, wherever it is.
    """
    inherited = os.environ if env is None else env
    child_env = without_rank(inherited) | {
        "PYTHONSAFEPATH": "1",
        "MEGARL_STORE": f"{inherited['MASTER_ADDR']}:{inherited['MASTER_PORT']}",
        "MEGARL_STORE_PREFIX": store_prefix(inherited),
        "MEGARL_WORLD_SIZE": inherited["WORLD_SIZE"],
        "MEGARL_RANK_0_PID": str(os.getpid()),
        JOB_SECRET: job_secret(),
    }
    child_env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # when the store goes away the driver says so itself
    driver = subprocess.Popen([sys.executable, "-P", "-m", module, *argv], env=child_env)
    threading.Thread(target=_watch_driver, args=(driver,), name="watch_driver", daemon=True).start()
    return driver


def without_rank(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that make a process a rank."""
    return {name: value for name, value in env.items() if not name.startswith(_OF_A_RANK)}


def _watch_driver(driver: subprocess.Popen) -> None:
    code = driver.wait()
    if code < 0:
        sys.stderr.write(f"[rank 0] the driver process was killed by signal {-code}; ending the job\n")
        sys.stderr.flush()
    if code != 0:
        os._exit(code if code > 0 else 1)


def world_size_from_env() -> int:
    """In the driver process: ranks of the job."""
    return int(os.environ["MEGARL_WORLD_SIZE"])


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM reached the driver."""

    def __init__(self, signum: int):
        super().__init__(signum)
        self.signal = signal.Signals(signum)


def run_driver(main: Callable[[StoreExecutor], object], ranks: dict[str, list[int]], call_timeout_s: float) -> int:
    """Run `main(executor)` in the process that `start_driver` started, then shut the workers down.

    Whatever goes wrong, one message goes to stderr: the first failure of any rank, else the driver's own error, else where the job
    was when a signal ended it. By then `main` has unwound, so its files are closed and its live display is gone.

    Returns: the exit code: 0; 1; 2 for a ValueError before the first call, which is about the user's input and shown without its
    traceback; 128 + n after signal n (130: Ctrl-C).
    """
    end_on_signals()
    end_with_parent(int(os.environ["MEGARL_RANK_0_PID"]))
    from megarl.driver.store_executor import StoreExecutor  # torch: what a signal interrupts there cannot be unwound

    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    executor = None
    try:
        executor = StoreExecutor.from_env(ranks, call_timeout_s)
        # A dead rank makes the collectives of its peers raise; by the time it takes torchrun to notice and end rank 0 it is known why.
        executor.death_first_s, executor.is_ending = _DEATH_FIRST_S, lambda: bool(_signals)
        main(executor)
        executor.shutdown()
        return 0
    except BaseException as error:  # process boundary
        _ignore_signals()
        sys.stdout.flush()
        sys.stderr.write(_explain(error, executor) + "\n")
        sys.stderr.flush()
        code = _exit_code(error, executor)
        _abort(executor, code)
        return code


def _exit_code(error: BaseException, executor: StoreExecutor | None) -> int:
    if executor is not None and executor.failure is not None:
        return 1
    if isinstance(error, Stopped):
        return 128 + error.signal
    return 2 if _is_about_input(error, executor) else 1


def _is_about_input(error: BaseException, executor: StoreExecutor | None) -> bool:
    return isinstance(error, ValueError) and (executor is None or executor.num_calls == 0)


def _explain(error: BaseException, executor: StoreExecutor | None) -> str:
    if executor is not None and executor.failure is not None:
        return str(executor.failure)
    if _is_about_input(error, executor):
        return str(error)
    where = "before the workers were reached" if executor is None else executor.where()
    if isinstance(error, Stopped):
        if error.signal == signal.SIGINT:
            return f"[driver] interrupted {where}"
        return f"[driver] stopped by {error.signal.name} (a worker died, or torchrun was told to stop) {where}"
    last = "".join(traceback.format_exception_only(error)).strip()
    step = None if executor is None else executor.step
    return f"[driver] failed{at_step(step)}: {last}\n{''.join(traceback.format_exception(error)).rstrip()}"


def _abort(executor: StoreExecutor | None, exit_code: int) -> None:
    if executor is None:
        return
    try:
        executor.abort(exit_code)
    except RuntimeError as error:  # the store is gone, and with it whoever would read this
        logger.debug("could not tell the workers: %s", error)


def _stop(signum: int, frame: FrameType | None) -> None:
    """First signal: unwind `main`, but not for longer than _UNWIND_S. The others, e.g. of rank 0's death just after, say nothing new.

    Ctrl-C also kills rank 0, whose death is a SIGTERM here. It may come first, so it waits for a SIGINT to overtake it; or while
    this function is at work on the SIGINT, which then goes on.
    """
    _signals.append(signum)
    if signum == signal.SIGTERM:
        if any(outer.f_code is _stop.__code__ for outer, _ in traceback.walk_stack(frame)):
            return
        signal.signal(signal.SIGTERM, _nothing)
        time.sleep(_OVERTAKE_S)
    _ignore_signals()
    deadline = threading.Timer(_UNWIND_S, os._exit, args=(128 + signum,))
    deadline.daemon = True
    deadline.start()
    raise Stopped(signum)


def _ignore_signals() -> None:
    signal.signal(signal.SIGINT, _nothing)
    signal.signal(signal.SIGTERM, _nothing)


def _nothing(signum: int, frame: FrameType | None) -> None:
    """Not SIG_IGN: Python complains on stderr when a signal that came before finds its handler gone."""
