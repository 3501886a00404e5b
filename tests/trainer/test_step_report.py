"""The metrics of a step: which updates and which samples a mean or a sum is over.

pytest tests/trainer/test_step_report.py"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from megarl.config.hf_config import ModelShape
from megarl.flow import Flow
from megarl.metrics import mean_over_updates
from megarl.packing import Sample
from megarl.trainer.preflight import Inputs
from megarl.trainer.state import TrainState
from megarl.trainer.step_batches import StepBatches
from megarl.trainer.step_report import metrics_of_actors
from tests.trainer.test_actor_state import config


@dataclass
class Report:
    """A call of the actor that has ended, with the metrics of each rank."""

    metrics: list[dict[str, float]]
    role: str = "actor"

    def result(self) -> list[dict[str, float]]:
        return self.metrics


@pytest.fixture
def state(tmp_path):
    one = config(tmp_path)
    return TrainState(one, {"": Inputs(ModelShape.load(one.model.model), range(7), None)})


@pytest.fixture
def batches(state):
    return StepBatches(3, Flow(), state.actors)


def updates_of(nlls: list[float | None], num_ranks: int) -> list[dict[str, float]]:
    """Each rank's mean over the updates, as the actor reports it, with a random part of an update on each
    rank. None: an update without a right answer."""
    rng, of_rank = random.Random(len(nlls)), []
    parts = [[rng.random() for _ in range(num_ranks)] for _ in nlls]
    for rank in range(num_ranks):
        per_update = []
        for nll, part in zip(nlls, parts, strict=True):
            share = part[rank] / sum(part)
            values = (0.0, 0.0) if nll is None else (nll * share, share)
            per_update.append({"policy/positive_nll": values[0], "policy/positive_share": values[1]})
        of_rank.append(mean_over_updates(per_update))
    return of_rank


@pytest.mark.parametrize("nlls", [[2.0, None, 1.0, None], [0.5], [1.0, 3.0], [None, 0.75]])
def test_the_nll_of_right_answers_is_a_mean_over_updates_that_have_one(state, batches, nlls):
    reports = [Report(updates_of(nlls, num_ranks=3)), Report([{"policy/loss": 1.0}, {}, None])]
    found = metrics_of_actors(batches, state, reports, {})[""]
    right = [nll for nll in nlls if nll is not None]
    assert found["policy/positive_nll"] == pytest.approx(sum(right) / len(right))
    assert found["policy/positive_share"] == pytest.approx(len(right) / len(nlls))
    assert found["policy/loss"] == 1.0


def test_a_step_without_a_right_answer_has_no_such_mean(state, batches):
    found = metrics_of_actors(batches, state, [Report(updates_of([None, None], num_ranks=2))], {})[""]
    assert "policy/positive_nll" not in found and found["policy/positive_share"] == 0


def test_tokens_trained_on_are_those_of_trained_samples(state, batches):
    batches.first.samples = [
        Sample(0, 12, 5, group=0),
        Sample(1, 9, 2, group=0),
        Sample(2, 40, 33, group=0, trained=False),
    ]
    batches.first.rewards = {0: 1.0, 1: 0.0, 2: 1.0}
    assert batches.num_tokens == 12 + 9
    found = metrics_of_actors(batches, state, [], {})[""]
    assert found["batch/tokens"] == 12 + 9 + 40 and found["untrained/tokens"] == 33


@pytest.mark.parametrize(
    "greedy_rewards, mean", [([None, None], None), ([1.0, None], 1.0), ([0.0, 1.0], 0.5)], ids=str
)
def test_the_mean_of_untrained_rewards_is_of_those_that_are_there(state, batches, greedy_rewards, mean):
    batches.first.samples = [
        Sample(0, 12, 5, group=0),
        Sample(1, 9, 2, group=0, trained=False),
        Sample(2, 9, 2, group=0, trained=False),
    ]
    batches.first.rewards = {0: 0.25, **dict(enumerate(greedy_rewards, start=1))}
    found = metrics_of_actors(batches, state, [], {})[""]
    assert found["untrained/samples"] == 2 and found.get("untrained/reward_mean") == mean
