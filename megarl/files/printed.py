"""Pass the output of processes that run users' code on to the log: whole lines, the first and last bytes of a
call.

The rest is only counted. A function that prints its whole input would otherwise fill the log of a long run.
"""

from __future__ import annotations

import os
import select
import threading

FIRST_BYTES = LAST_BYTES = 4096
"""Number of bytes from the beginning and from the end of one call that are passed on."""
_JOIN_S = 1.0


class Printed:
    """A pipe for a process's output, and the thread that reads the pipe.

    Args:
        who: what the process runs, for the line that says how much is left out.
        out: the descriptor of the log.

    Give `writer` to the process as its stderr, then call `follow`. The thread lives as long as any process
    has the other end of the pipe."""

    def __init__(self, who: str, out: int = 2) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._who, self._out, self._lock = who, out, threading.Lock()
        self._count, self._last, self._line = 0, b"", b""
        self._thread = threading.Thread(target=self._follow, name="output", daemon=True)

    def follow(self) -> None:
        """Close this process's copy of the writing end and start to read.

        Call this after the process has started."""
        os.close(self.writer)
        self._thread.start()

    def end_call(self) -> None:
        """Write the last bytes of this call's output to the log. Later output belongs to the next call."""
        with self._lock:
            self._take()
            self._finish()

    def close(self) -> None:
        """Wait, at most a second, until the thread has read the rest of the output.

        Call this after the process has ended; a child of the process may continue to print."""
        self._thread.join(_JOIN_S)

    def _follow(self) -> None:
        is_open, poll = True, select.poll()
        poll.register(self._reader, select.POLLIN)
        while is_open:
            poll.poll()
            with self._lock:
                is_open = self._take()
        with self._lock:
            self._finish()
            os.close(self._reader)
            self._reader = -1

    def _take(self) -> bool:
        """Read the available output. Returns False if no process can write any more."""
        while self._reader >= 0:
            try:
                data = os.read(self._reader, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            room = max(0, FIRST_BYTES - self._count)
            self._count += len(data)
            self._write(data[:room])
            self._last = (self._last + data[room:])[-LAST_BYTES:]
        return False

    def _finish(self) -> None:
        left_out = self._count - FIRST_BYTES - len(self._last)
        if left_out > 0:
            self._write(
                f"\n[{self._who}] {left_out} of {self._count} bytes that one call printed are left out "
                "here\n".encode()
            )
        self._write(self._last)
        if self._line:
            self._write(b"\n")
        self._count, self._last = 0, b""

    def _write(self, data: bytes) -> None:
        """Write whole lines to the log, and keep the beginning of the last one: others write to the log too."""
        lines, end, self._line = (self._line + data).rpartition(b"\n")
        data = lines + end
        while data:
            data = data[os.write(self._out, data) :]
