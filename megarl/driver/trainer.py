"""Training for people who write their own loop: this process is the driver.

config = megarl.load_config("@configs/quickstart_ppo.args", train_iters=5)
with megarl.PPOTrainer(config) as trainer:
    for step in trainer.steps():
        batch = trainer.rollout()
        metrics = trainer.update(batch)
        print(metrics["reward/mean"])
    print(trainer.evaluate())
    trainer.roles.actor.export_hf("out").result()
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from megarl.algorithms import GRPO, PPO, Algorithm
from megarl.checks.job import check_everything
from megarl.config.errors import ConfigError
from megarl.config.loader import write_args
from megarl.config.mesh import hosting_ranks
from megarl.config.schema import TrainConfig
from megarl.runtime.executor import Executor
from megarl.driver.job import Job, open_job
from megarl.driver.preflight import read_inputs
from megarl.loggers.console import Progress
from megarl.driver.training import Training
from megarl.runtime.process import quiet_libraries


class Trainer(Training):
    """A job with ranks of its own: starts them, sets the roles up, brings the first weights into the engines.

    AbortToken the `with` block, or `close`, ends all ranks; so do an exception, Ctrl-C, and the end of this
    process, whatever ends it. After a failure (RemoteError, a rank's death) no call works any more.

    Args:
        config: see `load_config`. --nproc-per-node ranks are started on this machine; with --executor inline
            there are none, and calls on roles are calls in this process, for pdb. The run folder --save is
            written as by `megarl train`.
        progress: print a line per step, as `megarl train` does.
    Raises: ConfigError for what is wrong with the job, before a model is built; RemoteError if a rank fails.
    """

    algorithm: type[Algorithm] = Algorithm
    """That the configuration must choose."""

    def __init__(self, config: TrainConfig, progress: bool = False):
        if not config.algorithm.needs_rollout or not isinstance(config.algorithm, self.algorithm):
            name, wanted = type(config.algorithm).__name__.lower(), self.algorithm.__name__.lower()
            raise ConfigError(
                [
                    f"--algorithm ({name}): "
                    + (
                        f"{type(self).__name__} wants {wanted}."
                        if self.algorithm is not Algorithm
                        else "nothing is sampled. Use `megarl train`."
                    )
                ]
            )
        self._open = _open(config, progress)
        job = self._open.__enter__()
        try:
            super().__init__(job)
            self.set_up()
        except BaseException:
            self._end(sys.exc_info())
            raise

    def steps(self) -> Iterator[int]:
        """The steps that are left of --train-iters, each followed by a checkpoint if one is due
        (--save-interval)."""
        for step in super().steps():
            yield step
            self.job.checkpoint_if_due(step)

    def close(self) -> None:
        """Wait for all that is in flight, shut the ranks down. After a failure raises it once more, with the
        ranks gone. Does nothing the second time."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._open is None:
            return
        if exc_info[1] is None:
            try:
                self.wait()
            except BaseException:
                self._end(sys.exc_info())
                raise
        self._end(exc_info)

    def _end(self, exc_info: tuple) -> None:
        opened, self._open = self._open, None
        opened.__exit__(*exc_info)


class PPOTrainer(Trainer):
    """Of an --algorithm ppo."""

    algorithm = PPO


class GRPOTrainer(Trainer):
    """Of an --algorithm grpo."""

    algorithm = GRPO


@contextlib.contextmanager
def _open(config: TrainConfig, progress: bool) -> Iterator[Job]:
    world_size = config.placement.nproc_per_node
    check_everything(config, world_size)
    shown = Progress(config.batch.train_iters, stream=None if progress else _Nowhere(), terminal=False)
    with _executor(config, world_size) as executor:
        inputs = read_inputs(config, world_size)  # while the ranks import what they need
        with open_job(executor, config, inputs, world_size, shown) as job:
            yield job


@contextlib.contextmanager
def _executor(config: TrainConfig, world_size: int) -> Iterator[Executor]:
    if config.placement.executor == "inline":
        quiet_libraries()
        from megarl.driver.executors import inline_ranks

        with inline_ranks(config) as executor:
            yield executor
        return
    from megarl.driver.executors import remove_engine_memory
    from megarl.runtime.local_ranks import local_ranks

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
    def write(self, text: str) -> int:
        return len(text)
