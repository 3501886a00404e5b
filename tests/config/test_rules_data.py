"""The rules of --train-data-weights and of the curriculum. `pytest tests/config/test_rules_data.py`"""

import pytest

from megarl.config.rules_data import curriculum, order_errors, weights_errors
from megarl.config.rules_layout import Job
from tests.algorithms.test_listing import load

FILES = ("a.jsonl", "b.jsonl")
WRONG = {
    (
        1.0,
    ): "--train-data-weights (1): must be one number per --train-data file (2). Try 1 1, or leave it out.",
    (1.0, 2.0, 3.0): "--train-data-weights (1 2 3): must be one number per --train-data file (2).",
    (1.0, 0.0): "--train-data-weights (1 0): must be above 0 and finite. Leave out a file",
    (-1.0, 1.0): "must be above 0 and finite",
    (float("inf"), 1.0): "must be above 0 and finite",
    (float("nan"), 1.0): "must be above 0 and finite",
}


@pytest.mark.parametrize("weights", WRONG)
def test_weights_that_are_none(weights):
    (error,) = weights_errors(weights, FILES)
    assert WRONG[weights] in error


@pytest.mark.parametrize("weights", [None, (3.0, 1.0), (0.1, 1e9)])
def test_weights_that_are_right(weights):
    assert [*weights_errors(weights, FILES)] == []


def test_a_resume_walks_as_before():
    plain, weighted = load(""), load("--train-data a b --train-data-weights 3 1")
    cursor = {"seed": plain.batch.seed, "shuffle": True}
    mixture = cursor | {"mixture": {"weights": [3.0, 1.0]}}
    assert [*order_errors(plain, 1, cursor), *order_errors(weighted, 1, mixture)] == []
    (error,) = order_errors(plain, 1, mixture)
    assert error == (
        "--train-data-weights (none): the run that --load continues walks over its files by weights. Try "
        "--train-data-weights 3 1."
    )
    (error,) = order_errors(weighted, 1, cursor)
    assert error == (
        "--train-data-weights (3 1): the run that --load continues walks over its files as one data set. Leave it out."
    )


CURRICULUM = {
    "--difficulty-rest 2": "--difficulty-rest (2): has no effect without a limit. Leave it out",
    "--difficulty-min 1 --difficulty-max 0": "--difficulty-max (0): must be above --difficulty-min (1). Try",
    "--algorithm sft --curriculum easy-first": "--curriculum: is by the rewards of sampled responses",
    "--difficulty-max 1 --train-data a b --train-data-weights 3 1": "--difficulty-max: is not built for --train-data-",
}


@pytest.mark.parametrize("flags", CURRICULUM)
def test_a_curriculum_that_cannot_be(flags):
    (error,) = curriculum(Job(load(flags), None, None, 1, {}))
    assert CURRICULUM[flags] in error


@pytest.mark.parametrize("flags", ["", "--curriculum hard-first", "--difficulty-min 0 --difficulty-rest 3"])
def test_a_curriculum_that_can(flags):
    assert [*curriculum(Job(load(flags), None, None, 1, {}))] == []


def test_a_resume_needs_a_curriculum_where_there_was_one():
    cursor = {"seed": load("").batch.seed, "shuffle": True, "measured": {}}
    (error,) = order_errors(load(""), 2, cursor)
    assert (
        "--actor-2-curriculum (shuffled): the run that --load continues had a curriculum" in error
        and "Try" in error
    )
    assert [*order_errors(load("--difficulty-max 1"), 1, cursor)] == []
