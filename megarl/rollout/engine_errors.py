"""What goes wrong in the processes of an out-of-process engine, as the rank that started it tells it: vLLM's
client knows no more than that something did, and its processes log the cause as they go."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import traceback

ERRORS = "MEGARL_ENGINE_ERRORS"
"""In the engine's processes: the file to write into, one JSON object per line."""


class EngineFailed(RuntimeError):
    """Something raised in a process of vLLM's engine; its traceback there is the cause."""


class _Traceback(Exception):
    """Shown as the text that it is."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class EngineErrors:
    """The rank's end: a file without a name, so that nothing is left however the job ends."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile("r", encoding="utf-8")
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def explained(self, error: Exception, rank: int) -> Exception:
        """What to raise for `error` of vLLM's client: what the engine has logged since this was last asked,
        if it has; else itself."""
        logged = [json.loads(line) for line in self._file.readlines()]
        if not logged:
            return error
        failed = EngineFailed(f"[rank {rank}] vLLM's engine failed: {logged[0]['error']}")
        failed.__cause__ = _Traceback(logged[0]["traceback"])
        return failed


def tell_owner() -> None:
    """In a process of the engine: write what vLLM logs of exceptions to the rank's file instead of on
    stderr."""
    path, logger = os.environ.get(ERRORS), logging.getLogger("vllm")
    if path is None or any(isinstance(handler, _ToOwner) for handler in logger.handlers):
        return
    for handler in logger.handlers:
        handler.addFilter(lambda record: not record.exc_info)
    logger.addHandler(_ToOwner(path))


class _ToOwner(logging.Handler):
    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        if not record.exc_info:
            return
        kind, error, trace = record.exc_info
        line = json.dumps(
            {
                "error": "".join(traceback.format_exception_only(error)).strip(),
                "traceback": "".join(traceback.format_exception(kind, error, trace)).rstrip(),
            }
        )
        with (
            contextlib.suppress(OSError),
            open(self._path, "a", encoding="utf-8") as file,
        ):  # the rank may be gone
            file.write(line + "\n")
