"""Run the driver of an evaluation beside rank 0 of the caller's torchrun; see megarl/evaluate.py."""

from __future__ import annotations

import functools
import sys

from megarl.evaluation.arguments import load_evaluation_on_rank, names_of_models, split_options
from megarl.evaluation.job import evaluate_job, progress_of
from megarl.trainer.launch import drive


def main(argv: list[str]) -> int:
    config = load_evaluation_on_rank(argv)
    options, _ = split_options(argv)
    job = functools.partial(evaluate_job, options=options, models=names_of_models(config))
    return drive(config, job, new_run=False, say=progress_of(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
