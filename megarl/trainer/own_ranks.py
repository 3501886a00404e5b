"""The ranks of a job that this process starts and ends: what a `Trainer` of a user's own program runs on."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.checks.job import check_everything
from megarl.config.render import write_args
from megarl.config.mesh import hosting_ranks
from megarl.config.schema import TrainConfig
from megarl.runtime.executor import Executor
from megarl.loggers.console import Progress
from megarl.trainer.preflight import Inputs, read_inputs
from megarl.runtime.process import quiet_libraries


@dataclass(frozen=True)
class Started:
    """Ranks that run, and what the driver has read for the job.

    Args:
        inputs: suffix of each actor -> its data.
        world_size: number of ranks.
        progress: shows steps; None: on stdout, as `megarl train` does.
    """

    executor: Executor
    inputs: Mapping[str, Inputs]
    world_size: int
    progress: Progress | None = None


@contextlib.contextmanager
def start_ranks(config: TrainConfig, progress: bool) -> Iterator[Started]:
    """Check the job, start its ranks on this machine, and end them afterwards.

    Raises: ConfigError for everything that is wrong with the job, before a rank is started."""
    world_size = config.placement.nproc_per_node
    check_everything(config, world_size)
    shown = Progress(config.batch.train_iters, stream=None if progress else _Nowhere(), terminal=False)
    with _executor(config, world_size) as executor:
        inputs = read_inputs(config, world_size)  # while the ranks import what they need
        yield Started(executor, inputs, world_size, shown)


@contextlib.contextmanager
def _executor(config: TrainConfig, world_size: int) -> Iterator[Executor]:
    if config.placement.executor == "inline":
        quiet_libraries()
        from megarl.trainer.executors import inline_ranks

        with inline_ranks(config) as executor:
            yield executor
        return
    from megarl.runtime.local_ranks import local_ranks
    from megarl.trainer.executors import remove_engine_memory

    with tempfile.TemporaryDirectory(prefix="megarl-") as folder:
        arguments = Path(folder) / "job.args"
        arguments.write_text(write_args(config))
        with local_ranks(
            [f"@{arguments}"],
            hosting_ranks(config, world_size),
            world_size,
            config.placement.call_timeout_s,
            tidy_up=remove_engine_memory,
        ) as executor:
            yield executor


class _Nowhere(io.TextIOBase):
    """A stream that drops what is written to it."""

    def write(self, text: str) -> int:
        return len(text)
