"""Start and end the ranks of a job from this process, for a `Trainer` in a user's own program."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megarl.checks.job import check_everything
from megarl.config.schema import TrainConfig
from megarl.runtime.executor import Executor
from megarl.loggers.console import Progress
from megarl.trainer.announce import line_on, starting_text
from megarl.trainer.executors import open_executor
from megarl.trainer.preflight import Inputs, read_inputs
from megarl.trainer.worker_check import is_checked_on_worker


@dataclass(frozen=True)
class Started:
    """Running ranks and the inputs that the driver has read for the job.

    Args:
        inputs: suffix of each actor -> its data.
        world_size: number of ranks.
        progress: shows steps; None shows them on stdout, as `megarl train` does.
    """

    executor: Executor
    inputs: Mapping[str, Inputs]
    world_size: int
    progress: Progress | None = None


@contextlib.contextmanager
def start_ranks(config: TrainConfig, progress: bool) -> Iterator[Started]:
    """Check the job, here or on a GPU node of its cluster (`ask_worker`), start its ranks, give them to the
    `with` block as a Started, and end them after it.

    Raises: ConfigError with all errors of the job, before a rank is started."""
    world_size = config.placement.world_size
    if not (is_checked := is_checked_on_worker(config)):
        check_everything(config, world_size)
    if progress:
        line_on()(starting_text(config, world_size))
    with open(os.devnull, "w") as nowhere, open_executor(config, world_size) as executor:
        # while the ranks import what they need
        inputs = read_inputs(config, world_size, is_checked=is_checked)
        stream = None if progress else nowhere
        shown = Progress(config.batch.train_iters, stream, terminal=False, interval=config.run.log_interval)
        yield Started(executor, inputs, world_size, shown)
