"""Run one rank of an evaluation: `megarl eval` starts the ranks itself, or your own torchrun does.

torchrun --nproc-per-node 2 -m megarl.evaluate --model FOLDER --eval-data FILE"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from megarl.train import main as run
from megarl.runtime.process import quiet_libraries
from megarl.trainer.announce import line_on

if TYPE_CHECKING:
    from megarl.config.schema import TrainConfig
    from megarl.runtime.executor import Executor
    from megarl.trainer.preflight import Inputs


def main(argv: list[str]) -> int:
    from megarl.evaluation.arguments import load_evaluation_on_rank, split_options

    def in_process(executor: Executor, config: TrainConfig, inputs: dict[str, Inputs], size: int) -> None:
        from megarl.evaluation.arguments import names_of_models
        from megarl.evaluation.job import evaluate_job

        options, _ = split_options(argv)
        evaluate_job(executor, config, inputs, size, options=options, models=names_of_models(config))

    say = line_on(sys.stderr if "--json" in argv else None)
    return run(argv, "megarl.evaluation.driver", in_process, False, load_evaluation_on_rank, say)


if __name__ == "__mp_main__":  # as in train.py
    quiet_libraries()
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
