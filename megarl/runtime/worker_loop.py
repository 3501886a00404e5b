"""Run the loop of a rank, which takes the driver's commands, runs its calls and reports.

Every rank gets all commands in one order (relay.py), runs those that call a role of the rank, and skips the
others. Ranks that share roles therefore run them in the same order.

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
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from megarl.runtime.hosting import HostedRoles, Roles, WorkerContext, stack_of_call, step_until
from megarl.runtime.key_value_store import KeyValueStore
from megarl.runtime.channel import ConnectionLost
from megarl.runtime.mailbox import Mailbox, connect
from megarl.runtime.messages import (
    Call,
    Command,
    Failure,
    Kill,
    Reply,
    Report,
    encode,
    read_command,
    signed_report,
)
from megarl.runtime.process import WRITES_CHECKPOINT, end_on_signals, end_with_parent
from megarl.runtime.relay import open_channel, report_directly
from megarl.runtime.shutdown_listener import ShutdownListener
from megarl.runtime.signing import SecretError

logger = logging.getLogger(__name__)
_KILL_WAIT_S = 5.0
_STARTUP = -1  # index of a failure before the first command
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
    except (dist.DistNetworkError, ConnectionLost, SecretError) as error:
        time.sleep(_KILL_WAIT_S)  # who has started this rank knows why, and ends it
        logger.error("[rank %d] lost the connection to the driver: %s", rank, str(error).splitlines()[0])
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
        store = connect(timeout_s=_KILL_WAIT_S)
        store.set_timeout(timedelta(seconds=_STARTUP_WAIT_S))
        report_directly(store, signed_report(Reply(_STARTUP, rank, failure=failure)))
    except (dist.DistError, ConnectionLost, SecretError):
        sys.stderr.write(f"[worker rank {rank}] start-up failed: {failure.error}\n{failure.traceback}\n")
        _exit(1)
    _end_failed(Mailbox(store), _STARTUP_WAIT_S)


def _answer_health(rank: int) -> None:
    with contextlib.suppress(dist.DistError):  # the job and its store end before anybody asks
        Mailbox(connect()).answer_health(
            rank, lambda: stack_of_call(threading.main_thread(), (WRITES_CHECKPOINT,))
        )


class _WorkerLoop:
    """Takes the commands of the driver on one rank, runs those for roles of this rank, and reports.

    All reports of this rank go over one connection, so that they arrive in their order. An event can be sent
    at any time, while the main thread waits for a command."""

    def __init__(self, rank: int, store: KeyValueStore, listener: ShutdownListener) -> None:
        self._rank, self._mailbox, self._listener = rank, Mailbox(store), listener
        self._channel, self._lock = open_channel(store), threading.Lock()
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
            self._fail(Failure.of(error, "worker", "start-up", None), _STARTUP)

    def _next(self, index: int) -> Command:
        try:
            step_until(self._context.idle_hook, self._channel.has_message, self._label)
        except Exception as error:  # process boundary
            hook = self._context.idle_hook
            assert hook is not None
            self._fail(Failure.of(error, hook.role, hook.method, self._label), index)
        return read_command(index, self._channel.next_message())

    def _run_call(self, hosted: HostedRoles, call: Call, index: int) -> Reply:
        start, self._label = time.perf_counter(), call.label
        try:
            return hosted.run(call, index)
        except BaseException as error:  # process boundary
            if self._listener.is_aborted(index, error):
                return Reply(index, self._rank, b"", time.perf_counter() - start, time.time())
            self._fail(Failure.of(error, call.role, call.method, call.label), index)

    def _report(self, report: Report) -> None:
        message = signed_report(report)
        with self._lock:
            self._channel.report(message)

    def _fail(self, failure: Failure, index: int) -> NoReturn:
        self._report(Reply(index, self._rank, failure=failure))
        _end_failed(self._mailbox, _STARTUP_WAIT_S if index == _STARTUP else _KILL_WAIT_S)


def _end_failed(mailbox: Mailbox, wait_s: float) -> NoReturn:
    """End this process with exit code 1 once the driver has shown its failure, within `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    while not mailbox.is_killed() and time.monotonic() < deadline:
        time.sleep(0.05)
    _exit(1)


def _exit(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
