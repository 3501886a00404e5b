"""What `megarl check` says of jobs that learn from answers in the data, alone or in pairs.

pytest tests/config/test_rules_preference.py"""

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.config.roles import place
from megarl.config.rules_layout import Job
from megarl.config.rules_preference import answers_of_data, preference

REQUIRED = "--model m --train-data d --save s --train-iters 1 --global-batch-size 8 --nproc-per-node 2"


def errors_of(flags):
    words = f"{flags} {REQUIRED}".split()
    config = load_config(words, REGISTRY)
    job = Job(config, None, None, 2, place(config, 2)[0])
    return [*answers_of_data(job), *preference(job)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--num-epochs 2",
            "--num-epochs (2): counts passes over the rows of one step, and with --algorithm dpo a step",
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
    assert (
        errors_of("--algorithm sft") == errors_of("--algorithm grpo --num-epochs 2 --temperature 0.7") == []
    )
    assert (
        errors_of("--algorithm grpo --kl-mode loss --kl-coef 0.1 --actor-ranks 0 --reference-ranks 1") == []
    )


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto", "orpo", "bradley-terry"])
def test_passes_over_the_data_are_counted_in_steps(algorithm):
    (error,) = errors_of(f"--algorithm {algorithm} --num-epochs 3")
    assert (
        f"--num-epochs (3): counts passes over the rows of one step, and with --algorithm {algorithm}"
        in error
    )
    assert "3 passes over the data are --train-iters of 3 x rows / 8" in error


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto", "orpo"])
@pytest.mark.parametrize("temperature", ["0", "0.7"])
def test_likelihoods_of_the_data_are_at_temperature_1(algorithm, temperature):
    (error,) = errors_of(f"--algorithm {algorithm} --temperature {temperature}")
    assert f"--temperature ({temperature}): is for sampling" in error and "Try --temperature 1." in error


def test_a_reward_model_has_no_temperature():
    assert errors_of("--algorithm bradley-terry --temperature 0.7") == []
