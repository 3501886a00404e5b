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
from megarl.trainer.next_commands import next_commands
from megarl.trainer.preflight import Inputs
from megarl.trainer.restarts import of_this_attempt
from megarl.trainer.graceful_stop import graceful_stop
from megarl.trainer.own_ranks import Started


def train_job(executor: Executor, config: TrainConfig, inputs: Mapping[str, Inputs], world_size: int) -> None:
    """Train until the last step on ranks that have started, and print what to do next. A SIGTERM saves the
    last completed step and raises Stopped."""
    with Trainer(config, started=Started(executor, inputs, world_size)) as trainer, graceful_stop(trainer):
        train(trainer)
    note = trainer.run_folder.progress.note  # the live display is gone
    if steps := sorted({step for actor in trainer.state.actors.values() for step in actor.jumps.steps}):
        note(
            f"A metric jumped at step {', '.join(map(str, steps))} (see the warning): "
            "the model may be destroyed."
        )
    note(next_commands(config))


def main(argv: list[str]) -> int:
    """Run the driver process of a training job under torchrun, and return its exit code.

    0 for success, 2 for a job whose configuration cannot start, 1 for a job that failed."""
    config = load_config(argv, REGISTRY)
    return drive(of_this_attempt(config), train_job, argv=argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
