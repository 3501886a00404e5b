"""Where --dynamic-sampling is refused. `pytest tests/config/test_rules_dynamic_sampling.py`"""

import pytest

from megarl.config.check import actors_errors
from megarl.config.rules_algorithm import dynamic_sampling
from megarl.config.rules_layout import Job
from tests.algorithms.test_listing import load

REFUSED = {
    "--algorithm ppo --dynamic-sampling": "--dynamic-sampling: --algorithm ppo does not compare",
    "--algorithm reinforce++ --dynamic-sampling": "--algorithm reinforce++ does not compare",
    "--algorithm sft --dynamic-sampling": "--algorithm sft does not compare",
    "--algorithm gdpo --dynamic-sampling": "--algorithm gdpo learns from single scores",
    "--dynamic-sampling --num-samples-per-prompt 1": "--num-samples-per-prompt (1): with --dynamic-sampling",
    "--dynamic-sampling --staleness 1": "is not built for asynchronous training, --staleness 1",
    "--dynamic-sampling --reward-model m": "is not built for --reward-model",
    "--max-sampling-rounds 3": "--max-sampling-rounds (3): has no effect without --dynamic-sampling",
}
ALLOWED = [
    "",
    "--dynamic-sampling",
    "--dynamic-sampling --max-sampling-rounds 3",
    "--algorithm rloo --dynamic-sampling",
    "--algorithm reinforce++-baseline --dynamic-sampling",
    "--algorithm ppo",
]


@pytest.mark.parametrize("flags", REFUSED)
def test_refused(flags):
    (error,) = dynamic_sampling(Job(load(flags), None, None, 1, {}))
    assert REFUSED[flags] in error and ("Try" in error or "Leave" in error)


@pytest.mark.parametrize("flags", ALLOWED)
def test_allowed(flags):
    assert [*dynamic_sampling(Job(load(flags), None, None, 1, {}))] == []


def test_several_actors():
    errors = [*actors_errors(load("--dynamic-sampling --num-actors 2"), 2)]
    assert any("--dynamic-sampling is not built for several actors" in error for error in errors)
