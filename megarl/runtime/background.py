"""Run functions that nothing waits for, one after the other, in one thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial

from megarl.futures import Future


class DriverCall(Future[object]):
    """A call of a function in this process."""

    def __init__(self, function: Callable[..., object], /, *args: object, **kwargs: object) -> None:
        self._work: Callable[[], object] | None = partial(function, *args, **kwargs)
        self._over = threading.Event()
        self._value: object = None
        self.error: BaseException | None = None

    def run(self) -> DriverCall:
        work, self._work = self._work, None  # its arguments may be large
        start = time.time()
        try:
            self._value = work and work()
        except Exception as error:  # thread boundary: `result` raises the error
            self.error = error
        self.ended = time.time()
        self.seconds = self.ended - start
        self._over.set()
        return self

    def wait(self) -> None:
        self._over.wait()

    def done(self) -> bool:
        return self._over.is_set()

    def result(self) -> list[object]:
        self.wait()
        if self.error is not None:
            raise self.error
        return [self._value]


class BackgroundThread:
    """A daemon thread that starts with the first call.

    A function that hangs does not keep a failed job from ending."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[DriverCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: DriverCall) -> DriverCall:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="flow_background", daemon=True)
            self._thread.start()
        self._calls.put(call)
        return call

    def close(self) -> None:
        """Wait for every submitted call."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
