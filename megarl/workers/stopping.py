"""A rank when the job is told to end: it lives on until the driver has decided what that means.

    SIGTERM          told to the driver. It may be the end of the whole job (then the driver ends it in order), or torchrun's answer to the
                     death of another rank: then that one does not answer, and the driver gives up
    stop/process     of each rank, to see on one machine at once whether it lives
    stop/driver      likewise of the driver
    stop/ping        answered by every rank that lives
    stop/leave       index of the first command that is not of the step that is dropped. Of it generation and rewards are to be left, see
                     `megarl.leaving`
    stop/all_asked   every rank knows that

The driver sets the last three in this order, or all of them to "end" when nobody will ask any more."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from megarl.leaving import LEAVING, Left
from megarl.workers.mailbox import TERMINATED, Mailbox, Result, connect
from megarl.workers.process import has_died, process_name

PROCESS, PING, LEAVE, ALL_ASKED = "stop/process", "stop/ping", "stop/leave", "stop/all_asked"
ASKED, END = b"asked", b"end"
DRIVER = "stop/driver"
# that a driver which lives, as far as one sees, may take to ask who lives: less than torchrun leaves until
# SIGKILL
_HEARD_S = 20.0
_CONNECT_S, _ASKED_S = 4.0, 10.0
_SAME_SIGNAL_S = 1.0  # within which a signal reaches all processes that it is sent to


class StopListener:
    """Answers the driver on a thread of its own; `join` after the driver has set END."""

    def __init__(self, rank: int):
        self._rank, self._terminated, self._pinged, self._asked = (
            rank,
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self._has_left, self._first_to_stay = False, 0
        self._thread = threading.Thread(target=self._listen, name="listen_for_stop", daemon=True)
        self._thread.start()
        _on_sigterm(self._end)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def is_left(self, index: int, error: BaseException) -> bool:
        """Whether nobody will read the value of this command, which has raised: the job is being stopped, and
        its step is dropped.

        After a call that was left those behind it may miss what it has not made. And what this rank has
        started (an engine, processes of rewards) may have got the same SIGTERM, and have got it first."""
        if not isinstance(error, Left) and self._terminated.wait(_SAME_SIGNAL_S):
            self._asked.wait(_ASKED_S)
        left = index < self._first_to_stay and (
            isinstance(error, Left) or self._has_left or self._terminated.is_set()
        )
        self._has_left = self._has_left or left
        return left

    def _listen(self) -> None:
        with contextlib.suppress(dist.DistError):  # the job, and its store, ends before anybody asks
            store = connect()
            store.set(f"{PROCESS}/{self._rank}", process_name())
            if store.get(PING) == END:
                return
            self._pinged.set()
            store.set(f"{PING}/{self._rank}", "1")
            if (first_to_stay := store.get(LEAVE)) == END:
                return
            self._first_to_stay = int(first_to_stay)
            LEAVING.board, LEAVING.is_asked = connect(), True
            self._asked.set()
            store.set(f"{LEAVE}/{self._rank}", "1")
            LEAVING.are_all_asked = store.get(ALL_ASKED) == ASKED

    def _end(self) -> None:
        """On a thread. Ends this process when the driver has, or does not know of it."""
        self._terminated.set()
        try:
            store = connect(timeout_s=_CONNECT_S)
            mailbox = Mailbox(store)
            mailbox.report(Result(TERMINATED, self._rank, pickle.dumps(None)))
            deadline = time.monotonic() + _HEARD_S
            while (
                not mailbox.aborted()
                and not _has_driver_died(store)
                and (self._pinged.is_set() or time.monotonic() < deadline)
            ):
                time.sleep(0.1)
        except dist.DistError:
            pass  # the store is gone, and with it the job
        os._exit(128 + signal.SIGTERM)


def _has_driver_died(store: dist.Store) -> bool:
    """Whether it is known that nobody will ask: not of a driver that is on its way, or on another machine."""
    return store.check([DRIVER]) and has_died(store.get(DRIVER).decode())


def _on_sigterm(call: Callable[[], None]) -> None:
    """Call this once, on a thread, after SIGTERM; at once also while the main thread is inside a collective,
    where no Python handler runs. On the main thread."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(reading, True)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(
        signal.SIGTERM, lambda signum, frame: None
    )  # last: a signal that comes earlier ends this process, and none is lost
    os.register_at_fork(after_in_child=_forget_sigterm)

    def wait() -> None:
        while signal.SIGTERM not in os.read(reading, 64):
            pass
        call()

    threading.Thread(target=wait, name="wait_for_sigterm", daemon=True).start()


def _forget_sigterm() -> None:
    """In a child, whose signals are not this rank's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
