"""The worker loop: take the next command of the log, run it if it is for a role of this rank, report, again.

    command          -> run, report the value
    command, aborted -> report no value (a graceful shutdown, see shutdown_listener.py)
    command, raises  -> report the failure; wait until the driver has shown it (5 s at most, 60 s at
    start-up); exit 1
    shutdown         -> report, return
    kill             -> exit with the driver's code

A failed worker waits because its exit makes the collectives of its peers fail, and torchrun kill everything:
first the cause must be told, by the driver, once. `os._exit` because exit hooks (of gloo, vLLM) would only
print the consequences.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from megarl.runtime.mailbox import SHUTDOWN, STARTUP, Command, Failure, Mailbox, Result, connect
from megarl.runtime.process import WRITES_CHECKPOINT, end_on_signals, end_with_parent
from megarl.runtime.shutdown_listener import ShutdownListener

logger = logging.getLogger(__name__)
_KILL_WAIT_S = 5.0
_STARTUP_WAIT_S = 60.0  # the driver may still be importing torch, and nobody else knows the reason
Roles = dict[str, object] | Callable[[], dict[str, object]]


def serve(
    roles: Roles,
    rank: int,
    store: dist.Store,
    driver: subprocess.Popen | None = None,
    teller: threading.Thread | None = None,
) -> int:
    """Serve the driver until it shuts the job down.

    Args:
        roles: role name -> object whose methods the driver calls; only the roles on this rank. Or a function
            that builds them: an error in it is then reported as any other.
        rank: of this process in the world.
        store: a connection of its own, see `mailbox.connect`.
        driver: on rank 0, the process from `start_driver`.
        teller: from `answer_for_stacks`, if that was called before.
    Returns: exit code of this worker: the driver's on rank 0, else 0. Does not return when the job fails.
    """
    end_on_signals()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # other launchers may start workers from a thread that ends early
        end_with_parent(os.getppid(), signal.SIGKILL)  # a SIGTERM asks for more
    listener = ShutdownListener(rank)
    mailbox = Mailbox(store)
    teller = teller or answer_for_stacks(rank)
    try:
        _serve(roles, rank, mailbox, listener)
    except dist.DistNetworkError as error:
        logger.error("[rank %d] lost the connection to the job's store: %s", rank, str(error).splitlines()[0])
        _exit(1)
    teller.join(_KILL_WAIT_S)
    listener.join(_KILL_WAIT_S)
    return driver.wait() if driver is not None else 0


def answer_for_stacks(rank: int) -> threading.Thread:
    """From now on tell the driver where the main thread is when it asks, once. Needs the job's store."""
    teller = threading.Thread(target=_tell_stack_when_asked, args=(rank,), name="tell_stack", daemon=True)
    teller.start()
    return teller


def fail_to_start(error: BaseException, rank: int) -> NoReturn:
    """Tell the driver of an error before `serve`; where its store cannot be reached, say it here. Ends the
    process."""
    failure = Failure.of(error, "worker", "start-up", None)
    try:
        mailbox = Mailbox(connect(timeout_s=_KILL_WAIT_S))
    except dist.DistError:
        sys.stderr.write(f"[worker rank {rank}] start-up failed: {failure.error}\n{failure.traceback}\n")
        _exit(1)
    _fail(failure, STARTUP, rank, mailbox)


def _tell_stack_when_asked(rank: int) -> None:
    with contextlib.suppress(dist.DistError):  # the job, and its store, ends before anybody asks
        Mailbox(connect()).tell_stack_when_asked(rank, _stacks)


def _stacks() -> str:
    """Of the main thread, below the worker loop, and of the one that writes a checkpoint. Needs the GIL,
    which every wait in torch or gloo gives up."""
    frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    inside = next(
        (i for i, frame in enumerate(frames) if frame.name == "_run" and frame.filename == __file__), -1
    )
    told = "".join(traceback.format_list(frames[inside + 1 :])).rstrip()
    for thread in threading.enumerate():
        if (
            thread.name == WRITES_CHECKPOINT
            and (frame := sys._current_frames().get(thread.ident)) is not None
        ):
            told += f"\nin its thread {thread.name}:\n" + "".join(traceback.format_stack(frame)).rstrip()
    return told


def _serve(roles: Roles, rank: int, mailbox: Mailbox, listener: ShutdownListener) -> None:
    hosted = roles if isinstance(roles, dict) else _build(roles, rank, mailbox)
    index = 0
    while isinstance(command := mailbox.next_command(index), Command):
        if rank in command.ranks:
            if command.method == SHUTDOWN and not command.role:
                mailbox.report(Result(index, rank, pickle.dumps(None)))
                return
            mailbox.report(_run(command, index, rank, hosted, mailbox, listener))
        index += 1
    _exit(command.exit_code)


def _build(build_roles: Callable[[], dict[str, object]], rank: int, mailbox: Mailbox) -> dict[str, object]:
    try:
        return build_roles()
    except BaseException as error:  # process boundary
        _fail(Failure.of(error, "worker", "start-up", None), STARTUP, rank, mailbox)


def _run(
    command: Command,
    index: int,
    rank: int,
    roles: dict[str, object],
    mailbox: Mailbox,
    listener: ShutdownListener,
) -> Result:
    start = time.perf_counter()
    try:
        if command.role not in roles:
            raise ValueError(f"role {command.role!r} is not on rank {rank}, which hosts {sorted(roles)}.")
        args, kwargs = pickle.loads(command.arguments)
        value = pickle.dumps(getattr(roles[command.role], command.method)(*args, **kwargs))
        return Result(index, rank, value, time.perf_counter() - start, time.time())
    except BaseException as error:  # process boundary
        if listener.is_aborted(index, error):
            return Result(index, rank, pickle.dumps(None), time.perf_counter() - start, time.time())
        _fail(Failure.of(error, command.role, command.method, command.step), index, rank, mailbox)


def _fail(failure: Failure, index: int, rank: int, mailbox: Mailbox) -> NoReturn:
    mailbox.report(Result(index, rank, b"", failure=failure))
    deadline = time.monotonic() + (_STARTUP_WAIT_S if index == STARTUP else _KILL_WAIT_S)
    while not mailbox.is_killed() and time.monotonic() < deadline:
        time.sleep(0.05)
    _exit(1)


def _exit(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
