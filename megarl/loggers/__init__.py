"""Log a run's metrics and samples to files in the run folder, to the console, and to the trackers that
--log-with names.

A new logger is a file with a class that has the four methods of `Logger`, a line in LOGGERS,
and its name in `log_with` of megarl/config/run_sections.py."""

from __future__ import annotations

import pkgutil
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from megarl.loggers.base import Logger, LoggerContext

LOGGERS = {
    "tensorboard": "megarl.loggers.tensorboard:TensorBoard",
    "wandb": "megarl.loggers.wandb:WeightsAndBiases",
    "mlflow": "megarl.loggers.mlflow:MLflow",
}
"""Name in --log-with -> module and class."""
_OPEN_S, _CLOSE_S = 120.0, 60.0

__all__ = ["LOGGERS", "Logger", "LoggerContext", "Tracker"]


class Tracker(threading.Thread):
    """One tracker of --log-with, which gets its records in order on a thread of its own, so that neither an
    outage nor a call that hangs disturbs training.

    The first failure is reported. Metrics that could not be written are tried again with the next record;
    samples are left out, because a tracker may refuse those alone.

    Args:
        note: shows a line to the user."""

    def __init__(self, name: str, context: LoggerContext, note: Callable[[str], object]) -> None:
        super().__init__(name=name, daemon=True)
        self._context, self._note = context, note
        self._records: deque[Any] = deque(maxlen=1000)  # that an outage may keep in memory
        self._logger: Logger | None = None
        self._error: Exception | None = None
        """The first failure."""
        self._is_closing = False
        self._woken = threading.Event()
        self._tried = threading.Event()
        self.start()

    def check(self) -> None:
        """Wait until the tracker has been opened. Raises: ValueError if that failed."""
        self._tried.wait(_OPEN_S)
        if self._logger is None:
            why = self._error or TimeoutError(f"no answer within {_OPEN_S:g} s")
            raise ValueError(
                f"--log-with ({self.name}): cannot be opened: {type(why).__name__}: {why}\nSet it up by its "
                "variables (WANDB_MODE=offline, MLFLOW_TRACKING_URI=http://HOST:PORT), or leave it out: "
                "metrics.jsonl has everything."
            )

    def write(self, method: str, *args: object) -> None:
        """Call this method of the logger soon."""
        self._records.append((method, *args))
        self._woken.set()

    def close(self, has_failed: bool) -> None:
        """Write what waits and end the run in the tracker, within a minute; a job that has failed waits for
        seconds only."""
        self._is_closing = True
        self._woken.set()
        self.join(3.0 if has_failed else _CLOSE_S)
        if not has_failed and self.is_alive():
            self._note(f"--log-with ({self.name}) hangs, and lacks the last records; metrics.jsonl has them")

    def run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closing
            try:
                self._write(is_last)
            except Exception as error:  # of a library that is not imported here
                if self._error is None and (self._tried.is_set() or self._context.first_step is not None):
                    self._note(
                        f"--log-with ({self.name}) fails, and is tried again at every step. Training goes "
                        f"on; metrics.jsonl has everything. {type(error).__name__}: {error}"
                    )
                self._error = self._error or error
            self._tried.set()
            if not is_last:
                self._woken.wait()
                self._woken.clear()

    def _write(self, is_last: bool) -> None:
        if self._logger is None:
            self._logger = pkgutil.resolve_name(LOGGERS[self.name])(self._context)
        while self._records:
            record = self._records.popleft()
            try:
                getattr(self._logger, record[0])(*record[1:])
            except Exception:
                if record[0] != "log_rollouts":
                    self._records.appendleft(record)
                raise
        if is_last:
            self._logger.close()
