"""Run one rank of an evaluation under torchrun: held-out accuracy, sampled and greedy.

torchrun ... -m megarl.evaluate @recipe.args --model FOLDER; `megarl eval` starts the ranks itself."""

from __future__ import annotations

import sys

from megarl.train import main as run
from megarl.runtime.process import quiet_libraries


def main(argv: list[str]) -> int:
    from megarl.trainer.evaluation import evaluate_job

    return run(argv, driver="megarl.trainer.evaluation", in_process_job=evaluate_job, new_run=False)


if __name__ == "__mp_main__":  # as in train.py
    quiet_libraries()
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
