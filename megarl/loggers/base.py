"""The interface of loggers, and the context that each gets when it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

Metrics = Mapping[str, float]
Purpose = Literal["train", "eval"]
Samples = Sequence[Mapping[str, object]]
"""Rows of rollouts/*.jsonl, one per sample: prompt, response, reward, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggerContext:
    """The run folder, names and first step, which every logger gets when it starts."""

    folder: Path
    """The run folder."""
    project: str
    """--log-project: the name under which trackers group several runs."""
    name: str
    """--log-name: the name of the run in trackers."""
    first_step: int | None = None
    """The first step that a resumed run records; records of it and of later steps are void. 0: a run that was
    resumed before its first checkpoint and begins anew. None: a new run."""


class Logger(Protocol):
    """Receives what a run records. All calls come from one thread of the driver, in the order of the
    steps, except for late evaluations."""

    def log_config(self, arguments: str) -> None:
        """Record the resolved arguments, the text of resolved.args. Called once, first."""

    def log_metrics(self, step: int, metrics: Metrics, wall_time: float) -> None:
        """Record the metrics of a step, evaluation included. Values may be NaN or infinite.

        An evaluation that ends after its step was recorded calls this a second time with the same step and
        all its metrics, which replace the first. With --eval-engines it may end in a later step: the second call
        then comes after calls of later steps, and has the metrics of the evaluation only.

        Args:
            wall_time: seconds since the epoch when the step ended."""

    def log_rollouts(self, step: int, samples: Samples, purpose: Purpose) -> None:
        """Record sampled responses of a step: the logged ones of training, or the first held-out row's
        answers."""

    def close(self) -> None:
        """Write everything that is still in memory. Called once, last."""


def flags_of(arguments: str) -> dict[str, str]:
    """Split the text of resolved.args into flag -> value; a flag without a value is "true", --no-flag is
    "false".

    Comments are left out. Example: "--lr 1e-4\\n--no-shuffle\\n" is {"lr": "1e-4", "shuffle": "false"}."""
    flags: dict[str, str] = {}
    for line in arguments.splitlines():
        if not line.startswith("--"):
            continue
        name, _, value = line.removeprefix("--").partition(" ")
        if not value and name.startswith("no-"):
            flags[name.removeprefix("no-")] = "false"
        else:
            flags[name] = value or "true"
    return flags
