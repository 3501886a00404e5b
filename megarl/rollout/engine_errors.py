"""Report errors of an out-of-process engine on the rank that started it.

vLLM's client knows only that an error occurred. The processes of the engine log its cause."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import traceback

ERRORS = "MEGARL_ENGINE_ERRORS"
"""Environment variable of the engine's processes: the file for their errors, one JSON object per line."""

_LAST_MESSAGES = ("EngineCore failed to start", "EngineCore encountered a fatal error")
"""Beginnings of what vLLM logs before an engine's process ends with the same exception."""


class EngineFailed(RuntimeError):
    """An exception in a process of vLLM's engine; `__cause__` holds its traceback there."""


class RemoteTraceback(Exception):
    """An exception whose text is the traceback of another process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class EngineErrors:
    """The file in which an engine's processes log errors for the rank that started them. It has no name, so
    it vanishes however the job ends."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile("r", encoding="utf-8")
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def explained(self, error: Exception, rank: int) -> Exception:
        """Return the exception to raise for `error` of vLLM's client.

        The result is the error that the engine has logged since the last call, or `error` itself if there is
        none."""
        logged = [json.loads(line) for line in self._file.readlines()]
        if not logged:
            return error
        failed = EngineFailed(f"[rank {rank}] vLLM's engine failed: {logged[0]['error']}")
        failed.__cause__ = RemoteTraceback(logged[0]["traceback"])
        return failed


def tell_owner() -> None:
    """Make vLLM's logger write the engine's exceptions to a file instead of stderr. The rank that started the
    engine reads the file and raises them.

    Call this in a process of the engine."""
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
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError:  # the rank may have ended
            return
        if record.getMessage().startswith(_LAST_MESSAGES):
            # multiprocessing would print the same traceback there as this process ends
            sys.stderr = open(os.devnull, "w")
