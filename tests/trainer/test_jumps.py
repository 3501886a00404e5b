"""Warnings of a step that has destroyed the model, on curves of real jobs.

pytest tests/trainer/test_jumps.py"""

import json
import math
import random
from pathlib import Path

import pytest

from megarl.trainer.jumps import RISE, WINDOW, JumpWatch

CURVES = json.loads((Path(__file__).parent / "jump_curves.json").read_text())
"""healthy, destroyed -> run -> metric -> value of each step."""
CLIP = {"policy": 1.0, "critic": 1.0}


def rows(columns: dict[str, list[float]]) -> list[dict[str, float]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def warnings_of(steps: list[dict[str, float]]) -> list[str]:
    watch = JumpWatch("policy/kl" in steps[0], CLIP)
    return [note for step, row in enumerate(steps, 1) if (note := watch.note(step, row))]


@pytest.mark.parametrize("name", CURVES["healthy"])
def test_a_healthy_run_is_not_warned_of(name):
    assert warnings_of(rows(CURVES["healthy"][name])) == []


@pytest.mark.parametrize("name", CURVES["destroyed"])
def test_a_learning_rate_that_destroys_the_model_is_warned_of_once_and_in_time(name):
    (warning,) = warnings_of(rows(CURVES["destroyed"][name]))
    assert int(warning.split()[1].rstrip(":")) <= 6
    assert " jumped from " in warning and "lower --lr" in warning


def steady(count: int, **others: float) -> list[dict[str, float]]:
    noise = random.Random(0)
    return [
        {"policy/entropy": noise.uniform(0.9, 1.1), "policy/grad_norm": noise.uniform(0.4, 0.8), **others}
        for _ in range(count)
    ]


def test_an_incident_is_told_once_and_the_next_one_again():
    destroyed = {"policy/entropy": 9.0, "policy/grad_norm": 50.0}
    (first,) = warnings_of([*steady(30), *[destroyed] * 40])
    assert first.startswith("step 31: policy/entropy jumped from ") and "; policy/grad_norm jumped" in first
    again = [*steady(30), destroyed, *steady(WINDOW - 1), destroyed, *steady(WINDOW), destroyed]
    assert [warning.split(":")[0] for warning in warnings_of(again)] == ["step 31", f"step {32 + 2 * WINDOW}"]


@pytest.mark.parametrize("factor, count", [(RISE * 0.9, 0), (RISE * 1.2, 1)])
def test_a_rise_counts_above_the_floor_only(factor, count):
    """A gradient norm far below --clip-grad may rise by any factor."""
    assert len(warnings_of([*steady(30), {"policy/grad_norm": factor * 1.6 - 1.0}])) == count
    small = [{"policy/grad_norm": 1e-6}] * 30
    assert warnings_of([*small, {"policy/grad_norm": 1.0}]) == []


def test_a_metric_that_varies_much_must_jump_further():
    jump = {"policy/grad_norm": 30.0}
    varied = [{"policy/grad_norm": 0.0 if step % 2 else 6.0} for step in range(30)]
    assert warnings_of([*varied, jump]) == []
    assert len(warnings_of([*[{"policy/grad_norm": 3.0}] * 30, jump])) == 1


def test_what_is_not_finite_is_left_to_the_check_of_updates():
    assert warnings_of([*steady(5), {"policy/grad_norm": math.nan, "policy/entropy": math.inf}]) == []


def test_the_second_actor_is_named():
    watch = JumpWatch(True, CLIP, "_2")
    assert "policy_2/kl jumped from 0 (before the first update) to 8" in watch.note(1, {"policy/kl": 8.0})
