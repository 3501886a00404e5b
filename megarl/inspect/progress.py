"""Show on stderr what a command is doing, if it takes long."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Self


EVERY_S = 5.0


class Progress:
    """Writes a line every few seconds until the `with` block ends: what is being done, and for how long.

        with Progress() as progress:
            progress.text = "loading the tokenizer"

    A command that ends before the first line is due writes none."""

    def __init__(self) -> None:
        self.text = "starting"
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="show_progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        self._thread.join()

    def _show(self) -> None:
        begun = time.monotonic()
        while not self._has_ended.wait(EVERY_S):
            sys.stderr.write(f"{self.text} ({time.monotonic() - begun:.0f} s so far)\n")
            sys.stderr.flush()
