"""Flags about checkpoints: a section of the configuration tree, see schema.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.config.errors import require


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """checkpoints and restarts"""

    load: str | None = None
    """Continue the run in this folder from its newest whole checkpoint, or from this one
    (run/checkpoints/step_000010), under the same or another layout. It may be the --save folder: the run then
    goes on there, or begins if there is no checkpoint yet."""
    save_interval: int = 0
    """Write a checkpoint to --save/checkpoints every so many steps and after the last, while training goes
    on; 0 is only when SIGTERM stops the job."""
    keep: int = 2
    """Newest checkpoints that stay; an older one is removed when a newer one is complete."""
    best_metric: str | None = None
    """A metric, such as eval/accuracy: of the checkpoints of steps that have it, the best one stays too."""
    best_metric_mode: Literal["max", "min"] = "max"
    """Which value of --best-metric is the best."""
    max_restarts: int = 0
    """After a failure start again from the newest checkpoint of the run, at most so many times. Not after
    errors in the configuration or the data, and not after signals. Under torchrun use its own
    --max-restarts."""
    exit_grace_s: float = 25.0
    """Seconds between SIGTERM and the end of the job, at most: it writes a checkpoint of the last whole step.
    Below what your scheduler leaves between SIGTERM and SIGKILL (Slurm and Kubernetes: 30)."""

    def __post_init__(self) -> None:
        require(self, at_least={"save_interval": 0, "keep": 1, "max_restarts": 0}, above={"exit_grace_s": 0})
