"""Keep a rank alive in a graceful shutdown until the driver has decided how to treat a SIGTERM.

    SIGTERM                  reported to the driver. It may mean the end of the whole job; then the driver
    shuts
                             it down gracefully. Or it is torchrun's answer to the death of another rank; then
                             that rank does not answer, and the driver gives up
    shutdown/process         name of each rank's process, so that a dead one is seen at once on one machine
    shutdown/driver          name of the driver's process
    shutdown/ping            answered by every live rank
    shutdown/abort           index of the first command that is not aborted; earlier ones abort where they
                             can, see abort.py
    shutdown/all_ranks_know  set when every rank has read shutdown/abort

The driver sets the last three in this order, or all of them to "end" when it will ask no more."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from megarl.runtime.abort import ABORT, Aborted
from megarl.runtime.key_value_store import KeyValueStore
from megarl.runtime.channel import ConnectionLost
from megarl.runtime.mailbox import Mailbox, connect, wait_for
from megarl.runtime.messages import Terminated, signed_report
from megarl.runtime.process import has_died, process_name
from megarl.runtime.relay import DRIVER_ADDRESS, report_directly
from megarl.runtime.signing import SecretError

PROCESS, PING = "shutdown/process", "shutdown/ping"
ABORT_CALLS, ALL_RANKS_KNOW = "shutdown/abort", "shutdown/all_ranks_know"
ASKED, END = b"asked", b"end"
DRIVER = "shutdown/driver"
# Seconds that a live driver may take to ping the ranks: less than torchrun waits before SIGKILL.
_HEARD_S = 20.0
_CONNECT_S = 2.0  # PyTorch tries twice
_ASKED_S = 10.0
_SAME_SIGNAL_S = 1.0  # a signal reaches all its processes within this time


class ShutdownListener:
    """Answers the driver's questions during a shutdown, on a thread of the rank. Call `join` after the driver
    has set END."""

    def __init__(self, rank: int):
        self._rank, self._terminated, self._pinged, self._asked = (
            rank,
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self._has_aborted, self._first_kept = False, 0
        self._thread = threading.Thread(target=self._listen, name="listen_for_shutdown", daemon=True)
        self._thread.start()
        _on_sigterm(self._end)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def is_aborted(self, index: int, error: BaseException) -> bool:
        """Return whether the driver has aborted command `index`, so that the `error` it has raised is no
        failure.

        Nobody reads the value of an aborted command. A call after an aborted one may fail because the aborted
        call's effects are missing. A child process of this rank, for example an engine, may have received the
        same SIGTERM earlier."""
        if not isinstance(error, Aborted) and self._terminated.wait(_SAME_SIGNAL_S):
            self._asked.wait(_ASKED_S)
        aborted = index < self._first_kept and (
            isinstance(error, Aborted) or self._has_aborted or self._terminated.is_set()
        )
        self._has_aborted = self._has_aborted or aborted
        return aborted

    def _listen(self) -> None:
        with contextlib.suppress(dist.DistError):  # the job and its store end before anybody asks
            store = connect()
            store.set(f"{PROCESS}/{self._rank}", process_name())
            if wait_for(store, PING) == END:
                return
            self._pinged.set()
            store.set(f"{PING}/{self._rank}", "1")
            if (first_kept := wait_for(store, ABORT_CALLS)) == END:
                return
            self._first_kept = int(first_kept)
            ABORT.store, ABORT.is_requested = connect(), True
            self._asked.set()
            store.set(f"{ABORT_CALLS}/{self._rank}", "1")
            ABORT.all_ranks_know = wait_for(store, ALL_RANKS_KNOW) == ASKED

    def _end(self) -> None:
        """After a SIGTERM, wait until the driver has ended or is out of reach, then end this process. Runs on
        a thread."""
        self._terminated.set()
        try:
            store = connect(timeout_s=_CONNECT_S)
            mailbox, is_reported = Mailbox(store), False
            deadline = time.monotonic() + _HEARD_S
            while (
                not mailbox.is_killed()
                and not _has_driver_died(store)
                and (self._pinged.is_set() or time.monotonic() < deadline)
            ):
                if not is_reported and store.check([DRIVER_ADDRESS]):  # the driver may still be starting
                    report_directly(store, signed_report(Terminated(self._rank)))
                    is_reported = True
                time.sleep(0.1)
        except (dist.DistError, ConnectionLost, SecretError):
            pass  # the store or the driver is gone, and the job with it
        os._exit(128 + signal.SIGTERM)


def _has_driver_died(store: KeyValueStore) -> bool:
    """Return True if the driver has certainly ended, False if it lives or if that is unknown.

    This is unknown for a driver that is starting or runs on another machine."""
    return store.check([DRIVER]) and has_died(store.get(DRIVER).decode())


def _on_sigterm(call: Callable[[], None]) -> None:
    """Make `call` run once, on a thread, after a SIGTERM, even while the main thread is inside a collective.

    No Python handler would run there. Call this on the main thread."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(reading, True)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(
        signal.SIGTERM, lambda signum, frame: None
    )  # last: an earlier signal ends this process, and none is lost
    os.register_at_fork(after_in_child=_forget_sigterm)

    def wait() -> None:
        while signal.SIGTERM not in os.read(reading, 64):
            pass
        call()

    threading.Thread(target=wait, name="wait_for_sigterm", daemon=True).start()


def _forget_sigterm() -> None:
    """Undo `_on_sigterm` in a forked child, whose signals are not this rank's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
