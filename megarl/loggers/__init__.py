"""Log a run's metrics and samples to files in the run folder, to the console, and to the trackers that
--log-with names.

A new logger is a file with a class that has the four methods of `Logger`, a line in LOGGERS,
and its name in `log_with` of megarl/config/run_sections.py."""

from __future__ import annotations

import pkgutil
import threading
from collections import deque
from collections.abc import Callable

from megarl.loggers.base import Logger, LoggerContext

LOGGERS = {
    "tensorboard": "megarl.loggers.tensorboard:TensorBoard",
    "wandb": "megarl.loggers.wandb:WeightsAndBiases",
    "mlflow": "megarl.loggers.mlflow:MLflow",
}
"""Name in --log-with -> module and class."""
_ADVICE = {
    "wandb": "Run `wandb login`, set WANDB_MODE=offline",
    "mlflow": "Set MLFLOW_TRACKING_URI to a server that answers, such as http://HOST:5000",
}
_OPEN_S, _CLOSE_S, _CLOSE_FAILED_S = 120.0, 60.0, 3.0
_MOST_WAITING = 1000  # records that an outage may keep in memory

__all__ = ["LOGGERS", "Logger", "LoggerContext", "Tracker"]


class Tracker:
    """One tracker of --log-with, which gets its records in order on a thread of its own, so that neither an
    outage nor a call that hangs disturbs training.

    The first failure is reported. Metrics that could not be written are tried again with the next record;
    samples are left out, because a tracker may refuse those alone.

    Args:
        arguments: the text of resolved.args.
        note: shows a line to the user."""

    def __init__(
        self, name: str, context: LoggerContext, arguments: str, note: Callable[[str], object]
    ) -> None:
        self._name, self._context, self._arguments, self._note = name, context, arguments, note
        self._records: deque[tuple[str, tuple[object, ...]]] = deque(maxlen=_MOST_WAITING)
        self._logger: Logger | None = None
        self._error: Exception | None = None
        """The first failure."""
        self._is_closing, self._woken, self._tried = False, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"log_to_{name}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Wait until the tracker has been opened. Raises: ValueError if that failed."""
        self._tried.wait(_OPEN_S)
        if self._logger is None:
            why = self._error or f"no answer within {_OPEN_S:g} s"
            raise ValueError(
                f"--log-with ({self._name}): cannot be opened: {type(why).__name__}: {why}\n"
                f"{_ADVICE.get(self._name, 'Make room on the disk')}, or leave {self._name} out: metrics.jsonl "
                "has everything."
            )

    def write(self, method: str, *args: object) -> None:
        """Call this method of the logger soon."""
        self._records.append((method, args))
        self._woken.set()

    def close(self, has_failed: bool) -> None:
        """Write what waits and end the run in the tracker, within a minute, or seconds if the job has failed."""
        self._is_closing = True
        self._woken.set()
        self._thread.join(_CLOSE_FAILED_S if has_failed else _CLOSE_S)
        if not has_failed and (self._thread.is_alive() or self._records):
            self._note(
                f"--log-with ({self._name}): not all is there; metrics.jsonl and rollouts/ are complete"
            )

    def _work(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closing
            try:
                self._write_all(is_last)
            except Exception as error:  # of a library that is not imported here
                if self._error is None and (self._tried.is_set() or self._context.first_step is not None):
                    self._note(
                        f"--log-with ({self._name}) fails, and is tried again at every step. Training goes on; "
                        f"metrics.jsonl has everything. {type(error).__name__}: {error}"
                    )
                self._error = self._error or error
            self._tried.set()
            if not is_last:
                self._woken.wait()
                self._woken.clear()

    def _write_all(self, is_last: bool) -> None:
        if self._logger is None:
            logger: Logger = pkgutil.resolve_name(LOGGERS[self._name])(self._context)
            logger.log_config(self._arguments)
            self._logger = logger
        while self._records:
            method, args = self._records.popleft()
            try:
                getattr(self._logger, method)(*args)
            except Exception:
                if method == "log_metrics":
                    self._records.appendleft((method, args))
                raise
        if is_last:
            self._logger.close()
