"""Run the driver process beside rank 0: check the job and run its loop."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.config.schema import TrainConfig
from megarl.runtime.executor import Executor
from megarl.trainer.trainer import Trainer
from megarl.trainer.loop import train
from megarl.trainer.launch import drive
from megarl.trainer.preflight import Inputs
from megarl.trainer.restarts import attempt_under_torchrun, continued
from megarl.trainer.graceful_stop import graceful_stop
from megarl.trainer.own_ranks import Started


def train_job(executor: Executor, config: TrainConfig, inputs: Mapping[str, Inputs], world_size: int) -> None:
    """Create the run folder and train."""
    with Trainer(config, started=Started(executor, inputs, world_size)) as trainer, graceful_stop(trainer):
        train(trainer)


def main(argv: list[str]) -> int:
    """Return the exit code of the driver.

    0 for success, 2 for a job whose configuration cannot start, 1 for a job that failed."""
    config = load_config(argv, REGISTRY)
    return drive(continued(config) if attempt_under_torchrun() else config, train_job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
