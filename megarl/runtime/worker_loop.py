"""Run the loop of a rank, which takes the driver's calls from the job's c10d store, runs them and reports.

The loop takes the next command of the log, runs it if a role of this rank is called, and reports.

    call             -> run, report the value
    call, aborted    -> report no value (a graceful shutdown, see shutdown_listener.py)
    call, raises     -> report the failure; wait until the driver has shown it, 5 s at most (60 s at
                        start-up); exit 1
    no command yet   -> the idle hook takes steps, if a role has registered one
    shutdown         -> report, return
    kill             -> exit with the driver's code

A failed worker waits because its exit makes the collectives of its peers fail and torchrun kill all ranks.
The driver must first report the cause, once. The worker uses `os._exit` because exit hooks (of gloo, vLLM)
would only print the consequences."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import NoReturn

import torch.distributed as dist

from megarl.runtime.hosting import HostedRoles, Roles, WorkerContext, stack_of_call, step_until
from megarl.runtime.key_value_store import KeyValueStore
from megarl.runtime.mailbox import STARTUP, Mailbox, connect
from megarl.runtime.messages import Call, Command, Failure, Kill, Reply, Report, encode
from megarl.runtime.process import WRITES_CHECKPOINT, end_on_signals, end_with_parent
from megarl.runtime.shutdown_listener import ShutdownListener

logger = logging.getLogger(__name__)
_KILL_WAIT_S = 5.0
_STARTUP_WAIT_S = 60.0  # the driver may still be importing torch, and nobody else knows the cause


def serve(
    roles: Roles,
    rank: int,
    store: KeyValueStore,
    driver: subprocess.Popen[bytes] | None = None,
    health: threading.Thread | None = None,
) -> int:
    """Run the driver's calls until it shuts the job down, and return this rank's exit code. A failure ends
    the process instead.

    Args:
        roles: roles of this rank; see `hosting.Roles`.
        rank: rank of this process in the world.
        store: a separate connection, see `mailbox.connect`.
        driver: on rank 0, the process from `start_driver`.
        health: thread from `answer_health`, if that was called before.
    Returns: exit code of this worker: the driver's on rank 0, else 0. Does not return when the job fails.
    """
    end_on_signals()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # other launchers may start workers from a short-lived thread
        # SIGKILL, because a SIGTERM requests a graceful shutdown
        end_with_parent(os.getppid(), signal.SIGKILL)
    listener = ShutdownListener(rank)
    health = health or answer_health(rank)
    try:
        _WorkerLoop(rank, store, listener).run(roles)
    except dist.DistNetworkError as error:
        logger.error("[rank %d] lost the connection to the job's store: %s", rank, str(error).splitlines()[0])
        _exit(1)
    health.join(_KILL_WAIT_S)
    listener.join(_KILL_WAIT_S)
    return driver.wait() if driver is not None else 0


def answer_health(rank: int) -> threading.Thread:
    """Start a thread that answers the driver's health questions with the stack of this rank's main thread,
    and return it.

    Needs the job's store."""
    thread = threading.Thread(target=_answer_health, args=(rank,), name="answer_health", daemon=True)
    thread.start()
    return thread


def fail_to_start(error: BaseException, rank: int) -> NoReturn:
    """Report an error before `serve` to the driver, and end the process with exit code 1.

    If the driver's store cannot be reached, the error is printed here."""
    failure = Failure.of(error, "worker", "start-up", None)
    try:
        mailbox = Mailbox(connect(timeout_s=_KILL_WAIT_S))
    except dist.DistError:
        sys.stderr.write(f"[worker rank {rank}] start-up failed: {failure.error}\n{failure.traceback}\n")
        _exit(1)
    _fail(failure, STARTUP, rank, mailbox)


def _answer_health(rank: int) -> None:
    with contextlib.suppress(dist.DistError):  # the job and its store end before anybody asks
        Mailbox(connect()).answer_health(
            rank, lambda: stack_of_call(threading.main_thread(), (WRITES_CHECKPOINT,))
        )


class _WorkerLoop:
    """Takes the commands of the driver on one rank, runs those for roles of this rank, and reports.

    Commands come over one connection, which blocks. All reports of this rank go over another connection, so
    that they arrive in their order and an event can be sent at any time."""

    def __init__(self, rank: int, store: KeyValueStore, listener: ShutdownListener) -> None:
        self._rank, self._commands, self._listener = rank, Mailbox(store), listener
        self._outbox, self._lock = Mailbox(connect()), threading.Lock()
        self._context = WorkerContext(rank, self._report)
        self._label: str | None = None  # of the last call

    def run(self, roles: Roles) -> None:
        """Run commands until the driver shuts the job down. A failure ends the process."""
        hosted = HostedRoles(self._build(roles), self._rank)
        index = 0
        while isinstance(command := self._next(index), Call):
            if self._rank in command.ranks:
                self._report(self._run_call(hosted, command, index))
            index += 1
        if isinstance(command, Kill):
            _exit(command.exit_code)
        self._report(Reply(index, self._rank, encode(None)))

    def _build(self, roles: Roles) -> Mapping[str, object]:
        try:
            return roles(self._context) if callable(roles) else roles
        except BaseException as error:  # process boundary
            self._fail(Failure.of(error, "worker", "start-up", None), STARTUP)

    def _next(self, index: int) -> Command:
        try:
            step_until(self._context.idle_hook, lambda: self._commands.has_command(index), self._label)
        except Exception as error:  # process boundary
            hook = self._context.idle_hook
            assert hook is not None
            self._fail(Failure.of(error, hook.role, hook.method, self._label), index)
        return self._commands.next_command(index)

    def _run_call(self, hosted: HostedRoles, call: Call, index: int) -> Reply:
        start, self._label = time.perf_counter(), call.label
        try:
            return hosted.run(call, index)
        except BaseException as error:  # process boundary
            if self._listener.is_aborted(index, error):
                return Reply(index, self._rank, b"", time.perf_counter() - start, time.time())
            self._fail(Failure.of(error, call.role, call.method, call.label), index)

    def _report(self, report: Report) -> None:
        with self._lock:
            self._outbox.report(report)

    def _fail(self, failure: Failure, index: int) -> NoReturn:
        with self._lock:
            _fail(failure, index, self._rank, self._outbox)


def _fail(failure: Failure, index: int, rank: int, mailbox: Mailbox) -> NoReturn:
    mailbox.report(Reply(index, rank, failure=failure))
    deadline = time.monotonic() + (_STARTUP_WAIT_S if index == STARTUP else _KILL_WAIT_S)
    while not mailbox.is_killed() and time.monotonic() < deadline:
        time.sleep(0.05)
    _exit(1)


def _exit(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
