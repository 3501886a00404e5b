"""Run the driver process beside rank 0: check the job and run its loop."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.config.mesh import hosting_ranks
from megarl.config.schema import TrainConfig
from megarl.runtime.executor import Executor
from megarl.trainer.trainer import Trainer
from megarl.trainer.loop import train
from megarl.trainer.preflight import Inputs, read_inputs
from megarl.trainer.restarts import attempt_under_torchrun, continued
from megarl.trainer.graceful_stop import graceful_stop
from megarl.trainer.own_ranks import Started
from megarl.trainer.executors import interfaces_of


def train_job(executor: Executor, config: TrainConfig, inputs: Mapping[str, Inputs], world_size: int) -> None:
    """Create the run folder and train."""
    with Trainer(config, started=Started(executor, inputs, world_size)) as trainer, graceful_stop(trainer):
        train(trainer)


def main(argv: list[str]) -> int:
    """Return the exit code of the driver.

    0 for success, 2 for a job whose configuration cannot start, 1 for a job that failed."""
    from megarl.runtime.process import world_size_from_env
    from megarl.runtime.torchrun import run_driver

    config = load_config(argv, REGISTRY)
    if attempt_under_torchrun():
        config = continued(config)
    world_size = world_size_from_env()
    ranks = hosting_ranks(config, world_size)
    return run_driver(
        lambda executor: train_job(executor, config, read_inputs(config, world_size), world_size),
        ranks,
        config.placement.call_timeout_s,
        interfaces_of(ranks),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
