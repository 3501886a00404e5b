"""Samples are named once in a run: whatever the sizes of data set, step and group, and wherever the run goes
on.

pytest tests/trainer/test_rollout_batch.py"""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.cursor import DataCursor
from megarl.trainer.rollout_batch import RolloutBatch
from megarl.invariants import check_plan, check_samples
from megarl.packing import Sample, plan_mini_batches


def steps(num_rows: int, num_prompts: int, group: int, resumed_at: int) -> list[RolloutBatch]:
    """Four steps of a job, one of which goes on from a checkpoint; in the second the user samples the step
    anew."""
    cursor, batches = DataCursor(num_rows, seed=1), []
    for step in range(1, 5):
        if step == resumed_at:
            cursor = DataCursor(num_rows).restored(json.loads(json.dumps(cursor.state())))
        batches.append(RolloutBatch(step, cursor.next_visits(num_prompts)))
        if step == 2:
            batches.append(RolloutBatch(step, cursor.visit(batches[-1].rows)))
    for batch in batches:
        ids = [(visit * group + index, visit) for visit in batch.visits for index in range(group)]
        batch.samples = [
            Sample(sample, 5 + sample % 7, 1 + sample % 3, digest=sample, group=visit)
            for sample, visit in ids
        ]
    return batches


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 20), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_every_sample_of_a_run_has_an_id_of_its_own(num_rows, num_prompts, group, resumed_at, dp_size):
    """Groups of one sample are what supervised fine-tuning plans: its samples are visits."""
    batches = steps(num_rows, num_prompts, group, resumed_at)
    counted = Counter(sample for batch in batches for sample in batch.sample_ids)
    assert {*counted.values()} == {1} and len(counted) == 5 * num_prompts * group
    for batch in batches:
        check_samples(batch.samples, dict.fromkeys(batch.visits, group), max_length=16)
        plan = plan_mini_batches(batch.samples, 3, {}, dp_size, max_tokens=20, hidden_size=8, seed="a")
        check_plan(plan, batch.samples, max_tokens=20)
        assert [batch.row_of[sample] for sample in batch.sample_ids[::group]] == batch.rows
        assert Counter(batch.group_ids) == dict.fromkeys(batch.visits, group)
    walked = [row for index, batch in enumerate(batches) if index != 2 for row in batch.rows]
    assert walked == DataCursor(num_rows, seed=1).next_rows(len(walked))


def test_the_scores_of_rule_and_models_have_names_and_weights():
    samples = [Sample(i, 2, 1, group=0) for i in range(2)]
    batch = RolloutBatch(1, {0: 0}, samples)
    batch.records["reward"] = {
        0: {"reward": 1.2, "scores": {"correct": 1.0, "short": 0.4}},
        1: {"reward": None, "failure": "raised"},
    }
    batch.records["reward_model"] = {0: {"score": -1.0}, 1: {"score": 3.0}}
    assert batch.scores({"reward": 1.0, "reward_model": 0.1}, {"short": 0.5}) == {
        "scores": {"correct": [1.0, None], "short": [0.4, None], "reward_model": [-1.0, 3.0]},
        "score_weights": {"correct": 1.0, "short": 0.5, "reward_model": 0.1},
    }
    batch.records["reward"] = {0: {"reward": 1.0}, 1: {"reward": 0.0}}
    assert batch.scores({"reward": 1.0}, {}) == {
        "scores": {"reward": [1.0, 0.0]},
        "score_weights": {"reward": 1.0},
    }
