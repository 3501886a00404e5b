"""Ages of tokens as metrics, and what the driver does with samples that older weights sampled.

pytest tests/trainer/test_staleness.py"""

from __future__ import annotations

import pytest

from megarl.config.hf_config import ModelShape
from megarl.packing import Sample
from megarl.runtime.inline_executor import InlineExecutor
from megarl.trainer.executors import interfaces_of
from megarl.trainer.gate import GateError, LogProbGate
from megarl.trainer.preflight import Inputs
from megarl.trainer.staleness import staleness_metrics
from megarl.trainer.state import TrainState
from tests.trainer.test_actor_state import config


def test_metrics_of_ages_by_hand():
    """Step 6 trains the weights of version 5: 12 of the 20 tokens have age 0, 2 have age 1, 6 have age 2."""
    samples = [
        Sample(0, 9, 4, version=3),
        Sample(1, 9, 8, version=3, version_runs=((3, 2), (4, 2), (5, 4))),
        Sample(2, 9, 7, version=5),
        Sample(3, 9, 1, version=5),
    ]
    assert staleness_metrics(samples, step=6, bound=3) == {
        "staleness/mean": (2 + 2 * 6) / 20,
        "staleness/max": 2,
        "staleness/mixed": 0.25,
        "staleness/share_0": 12 / 20,
        "staleness/share_1": 2 / 20,
        "staleness/share_2": 6 / 20,
        "staleness/share_3": 0,
        "staleness/length_mean_0": 4,
        "staleness/length_mean_2": 6,
    }


class Actor:
    """Returns the metrics of the gate that it is given."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def log_probs(self, version: int | None = None) -> dict[str, float]:
        return self.metrics

    def worst_tokens(self, count: int) -> list[dict]:
        return []


def test_a_step_without_a_token_of_the_current_weights_does_not_pass_the_gate(tmp_path):
    """The gate judges the first step that has one."""
    job = config(tmp_path)
    state = TrainState(job, {"": Inputs(ModelShape.load(job.model.model), range(10), None)})
    actor = Actor()
    executor = InlineExecutor({"actor": actor}, interfaces_of({"actor": actor}))
    gate = LogProbGate(executor, state)
    agree = {f"mismatch/{name}": 0.0 for name in ("mean_abs", "clipped_abs", "max_abs", "outliers", "kl")}
    agree |= {"mismatch/log_prob_abs": 1.0, "mismatch/tokens": 10}

    def check(metrics: dict[str, float]) -> bool:
        actor.metrics = metrics
        gate.check_first(executor.call("actor", "log_probs", 3))
        return state.first.gate_passed

    assert not check({"mismatch/tokens": 0, "off_policy/mean_abs": 0.5})
    with pytest.raises(GateError, match="disagree on 10 sampled tokens"):
        check(agree | {"mismatch/max_abs": 1.0})
    assert not state.first.gate_passed
    assert check(agree)
    executor.shutdown()
