"""Run functions of the driver in one background thread, one after the other; nothing waits for them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial

from megarl.futures import Future


class DriverCall(Future[object]):
    """Future of a function that is called in this process. `result` returns [value], or raises the function's
    error."""

    def __init__(self, function: Callable[..., object], /, *args: object, **kwargs: object) -> None:
        self._work: Callable[[], object] | None = partial(function, *args, **kwargs)
        self._over = threading.Event()
        self._value: object = None
        self.error: BaseException | None = None

    def run(self, kept: type[BaseException] = Exception) -> DriverCall:
        """Call the function. Errors of the kind `kept` are raised by `result`, others at once."""
        work, self._work = self._work, None  # its arguments may be large
        start = time.time()
        try:
            self._value = work and work()
        except kept as error:
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
    """A daemon thread that runs the submitted functions in order. It starts with the first of them.

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
        """Wait until every submitted function has ended. Their errors are not raised here."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run(kept=BaseException)  # SystemExit would end this thread without a word
