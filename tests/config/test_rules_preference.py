"""What `megarl check` says of jobs that learn from pairs.

pytest tests/config/test_rules_preference.py"""

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.config.roles import place
from megarl.config.rules_layout import Job
from megarl.config.rules_preference import preference

REQUIRED = "--model m --train-data d --save s --train-iters 1 --global-batch-size 8 --nproc-per-node 2"


def errors_of(flags):
    words = f"{flags} {REQUIRED}".split()
    config = load_config(words, REGISTRY)
    return [*preference(Job(config, None, None, 2, place(config, 2)[0]))]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--num-epochs 2",
            "--num-epochs (2): a pair's loss is derived from the model's output before the step",
        ),
        ("--actor-ranks 0 --reference-ranks 1", "--reference-ranks (1): with --algorithm dpo the reference"),
        (
            "--tensor-model-parallel-size 2 --reference-tensor-model-parallel-size 1",
            "--reference-tensor-model-parallel-size (1): with --algorithm dpo it must be the actor's (2)",
        ),
        (
            "--reference-context-parallel-size 2",
            "--reference-context-parallel-size (2): with --algorithm dpo it must be the actor's (1)",
        ),
    ],
)
def test_what_pairs_do_not_allow_is_refused(flags, message):
    (error,) = errors_of(f"--algorithm dpo {flags}")
    assert message in error and ("ry --num-epochs 1" in error or "Leave it out" in error)


def test_other_algorithms_and_whole_jobs_are_not_concerned():
    assert errors_of("--algorithm dpo") == errors_of("--algorithm simpo --context-parallel-size 2") == []
    assert errors_of("--algorithm sft --num-epochs 2") == []
    assert (
        errors_of("--algorithm grpo --kl-mode loss --kl-coef 0.1 --actor-ranks 0 --reference-ranks 1") == []
    )
