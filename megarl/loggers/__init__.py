"""Log a run's metrics and samples to files in the run folder, to the console, and to the trackers that
--log-with names.

A new logger is a file with a class that has the four methods of `Logger`, a line in LOGGERS,
and its name in `log_with` of megarl/config/run_sections.py."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence

from megarl.loggers.base import Logger, LoggerContext

LOGGERS = {
    "tensorboard": "megarl.loggers.tensorboard:TensorBoard",
    "wandb": "megarl.loggers.wandb:WeightsAndBiases",
    "mlflow": "megarl.loggers.mlflow:MLflow",
}
"""Name in --log-with -> module and class."""

__all__ = ["LOGGERS", "Logger", "LoggerContext", "open_loggers"]


def open_loggers(names: Sequence[str], context: LoggerContext) -> list[Logger]:
    """Return started loggers for these names, in this order. Their libraries are imported only now."""
    return [pkgutil.resolve_name(LOGGERS[name])(context) for name in names]
