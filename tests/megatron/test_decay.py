"""Which parameters each optimizer decays, by how much, and at which learning rate, before and after a resume.

The gradients are zero, so AdamW multiplies what it decays by 1 - lr x weight decay, and leaves the rest as it is.
One torchrun job with two ranks (run_decay.py) takes the steps. What is expected is computed here, from the names
that matrices, norms and biases have and from the definition of the schedule. Mutations that made these fail: weight
decay on norms and biases, none on matrices, a schedule that begins anew at a resume, another --weight-decay at the
end of the run.

    pytest tests/megatron/test_decay.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.megatron.cases import DECAY, DECAY_CASES, DECAY_RESUMED, DECAY_STEPS, name_of, run_ranks
from tests.megatron.layouts import LAYOUTS


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    out = tmp_path_factory.mktemp("decay")
    run_ranks("run_decay.py", out, 2)
    return [json.loads((Path(out) / f"decay_{rank}.json").read_text()) for rank in (0, 1)]


def rate(step: int) -> float:
    """The learning rate of a step: a linear warm-up from 0, then a straight line to --min-lr."""
    warmup, end = DECAY["lr_warmup_iters"], DECAY["lr_decay_iters"]
    if step <= warmup:
        return DECAY["lr"] * step / warmup
    return DECAY["min_lr"] + (DECAY["lr"] - DECAY["min_lr"]) * max(0, end - step) / (end - warmup)


def decays(name: str) -> bool:
    """Matrices do; norms and biases, the router's corrections among them, do not."""
    return "norm" not in name and not name.endswith("bias")


@pytest.mark.parametrize("case", DECAY_CASES, ids=name_of)
def test_matrices_decay_at_the_rate_of_the_step_and_nothing_else_does(reports, case):
    found = [report[name_of(case)] for report in reports if name_of(case) in report]
    assert len(found) == LAYOUTS[case[1]].ranks
    tolerance, kinds, rates = (8e-3 if LAYOUTS[case[1]].bf16 else 1e-6), set(), []
    for of_rank in found:
        numbered = [*enumerate(of_rank["steps"], 1), *enumerate(of_rank["resumed"], DECAY_RESUMED + 1)]
        assert len(numbered) == 2 * DECAY_STEPS - DECAY_RESUMED
        for number, step in numbered:
            rates += [(value, rate(number)) for value in step.pop("lr")]
            for name, factors in step.items():
                is_trained = name in of_rank["trained"]
                kinds.add((is_trained, decays(name)))
                factor = 1 - rate(number) * DECAY["weight_decay"] if is_trained and decays(name) else 1.0
                assert factors == pytest.approx([factor, factor], abs=tolerance), (number, name)
    assert {(True, True)} < kinds and ((True, False) in kinds) == (case[3] == 0)
    assert len(rates) == 2 * DECAY_STEPS - DECAY_RESUMED
    for value, expected in rates:
        assert value == pytest.approx(expected, rel=1e-12)


def test_adapters_and_the_value_head_are_all_that_is_trained_beside_frozen_weights(reports):
    """Otherwise the test above would take a frozen weight for one that does not decay."""
    for case in DECAY_CASES:
        for found in (report[name_of(case)] for report in reports if name_of(case) in report):
            names = found["steps"][0].keys() - {"lr"}
            expected = {name for name in names if not name.endswith("router.expert_bias")}
            if case[3]:
                expected = {name for name in names if ".adapter." in name or name == "value_head.weight"}
            assert {*found["trained"]} == expected
