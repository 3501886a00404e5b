"""The first update of a step sees the log-probs and values of before it, and gives its tokens the weights
that add up to what its aggregation promises. Each fault planted here was silent before: the job went on, with
exit code 0.

    pytest tests/workers/test_first_update.py             every fault, in an actor and a critic on two
    data-parallel ranks pytest tests/workers/test_first_update.py -m nightly     no false alarm in other layouts,
    where equal means to the last bit"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.workers.role_steps import run_on_ranks
from tests.workers.run_first_update import FAULTS, LAYOUTS

SCRIPT = Path(__file__).with_name("run_first_update.py")
_LOG_PROBS = (
    r"InvariantError: actor: the first update of the step does not reproduce the log-probs "
    r"computed before it: the largest difference of "
)
_VALUES = _LOG_PROBS.replace("actor", "critic").replace("log-probs", "values")
_WEIGHTS = (
    r"InvariantError: {}: the weights that the loss gave \d+ tokens add up to {} over all "
    r"ranks, and its aggregation promises 1\."
)
MESSAGES = {
    "update_has_another_temperature": _LOG_PROBS
    + r"\d+ response tokens is 0\.\d+, and the limit 0 .*\n  sample \d+, token \d+ at position",
    "temperature_off_by_a_bit": _LOG_PROBS,
    "weights_changed_in_between": _LOG_PROBS,
    "critic_weights_changed_in_between": _VALUES,
    "policy_loss_divided_by_local_counts": _WEIGHTS.format("actor", "2"),  # of two ranks
    "value_loss_divided_by_local_counts": _WEIGHTS.format("critic", "2"),
    "weights_of_the_micro_batch": _WEIGHTS.format("actor", r"\d"),
    "gradients_averaged_over_ranks": "InvariantError: actor: gradients are multiplied by 0.5 where "
    "the ranks sum theirs",
    "value_loss_divided_by_micro_batches": _WEIGHTS.format("critic", r"0\.\d+"),
    # The gradient of the output layer is in main_grad by then: on a CPU that is seen first.
    "policy_loss_divided_by_micro_batches": "RuntimeError: fused_linear_policy_loss: backward "
    "started with 0.5",
}


def reports(folder: Path, data: Path, *names: str) -> list[dict]:
    said = run_on_ranks(SCRIPT, folder, data, *names)
    return [
        json.loads((folder / f"report_{rank}.json").read_text()) | {"said": said[rank]} for rank in range(2)
    ]


@pytest.fixture(scope="module")
def faults(tmp_path_factory, sums_data) -> list[dict]:
    return reports(tmp_path_factory.mktemp("first_update"), sums_data, "faults")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_step_on_all_ranks_by_name_and_before_a_weight_changes(faults, fault):
    import re

    (message, unchanged), (of_rank_1, unchanged_there) = (found["faults"][fault] for found in faults)
    assert re.match(MESSAGES[fault], message, re.DOTALL), message
    assert message == of_rank_1 and unchanged and unchanged_there


def test_log_probs_of_somebody_else_are_not_compared_and_that_is_said(faults):
    """As of a flow that takes them from elsewhere. Without a comparison a ratio of exp(0.01) is no error."""
    assert faults[0]["faults"]["somebody_elses_log_probs"][0] > 0.005
    said = [
        found["said"].count("actor has not computed old_log_probs in this step itself") for found in faults
    ]
    assert sum(said) == 1


def test_an_actor_that_is_not_trained_has_the_same_weights_and_no_optimizer(faults):
    """As `megarl eval` builds it."""
    for found in faults:
        assert found["faults"]["without_optimizer"] == ["(None, [])", True]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory, sums_data) -> list[dict]:
    return reports(tmp_path_factory.mktemp("first_update"), sums_data, *LAYOUTS)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_gives_a_false_alarm(layouts, layout):
    for found in layouts:
        assert not isinstance(found[layout], str), found[layout]
        assert (
            found[layout]["policy/grad_norm"] > 0 and found[layout]["policy/ratio_deviation_max"] > 0
        )  # of the second mini-batch


@pytest.mark.nightly
@pytest.mark.parametrize("loss", ["gspo", "gmpo", "dppo-tv", "sapo"])
def test_losses_and_corrections_do_not_depend_on_how_sequences_are_split(layouts, loss):
    """Two data-parallel ranks, and two context-parallel ranks that have a part of each response."""
    for found in layouts:
        apart, split = found[f"dp2_{loss}"], found[f"cp2_{loss}"]
        assert 0.02 < apart["correction/mis_masked"] < 0.98
        same = [name for name in apart if name.startswith(("policy/", "correction/", "advantage/"))]
        assert {n: split[n] for n in same} == pytest.approx({n: apart[n] for n in same}, rel=2e-3, abs=1e-5)


@pytest.mark.nightly
def test_all_ranks_stop_after_the_same_epoch(layouts):
    """The second mini-batch of the first epoch has moved, by more than so small a limit."""
    for layout in ("dp2_early_stop", "cp2_early_stop"):
        assert [found[layout]["policy/epochs"] for found in layouts] == [1, 1]
