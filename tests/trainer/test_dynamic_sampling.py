"""Dynamic sampling: what a step keeps, and that each pass over the data uses each row once.

pytest tests/trainer/test_dynamic_sampling.py"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.hf_config import ModelShape
from megarl.packing import Sample
from megarl.trainer.dynamic_sampling import DynamicSamplingError, Refill, fill_step
from megarl.trainer.preflight import Inputs
from megarl.trainer.rollout_batch import RolloutBatch
from megarl.trainer.state import TrainState
from tests.trainer.test_actor_state import config


@pytest.fixture
def job(tmp_path):
    """job(rows=, prompts=, samples=, ...) -> state of a run with dynamic sampling."""
    one = replace(config(tmp_path), algorithm=REGISTRY["grpo"]())
    shape = ModelShape.load(one.model.model)

    def build(rows, prompts, samples, seed=0, shuffle=True, most_rounds=10**6):
        batch = replace(
            one.batch,
            num_prompts=prompts,
            num_samples_per_prompt=samples,
            global_batch_size=prompts * samples,
            seed=seed,
            dynamic_sampling=True,
            max_sampling_rounds=most_rounds,
        )
        of_job = replace(one, batch=batch, data=replace(one.data, shuffle=shuffle))
        return TrainState(of_job, {"": Inputs(shape, range(rows), None)})

    return build


class Engine:
    """Samples whose rewards depend on seed, visit and index alone, and come in a random order.

    `seen` has visit -> (row, rewards) of all prompts that it was given."""

    def __init__(self, state, seed, share):
        self.state, self.seed, self.share, self.seen = state, seed, share, {}
        self.rounds = []
        """Visits of each round, and whether it must keep the samples of the one before."""

    def rewards(self, visit):
        draw = random.Random(f"{self.seed}/{visit}")
        size = self.state.first.config.batch.num_samples_per_prompt
        level = draw.choice([0.0, 0.5, 1.0])
        values = [level] * size
        if draw.random() < self.share:
            values = [draw.choice([0.0, 1.0]) for _ in range(size)]
        return [None if draw.random() < 0.1 else value for value in values]

    def __call__(self, is_further):
        buffer, step = self.state.first.buffer, self.state.step
        visits = buffer.issue()
        self.rounds.append(([*visits], is_further))
        samples = []
        for visit, row in visits.items():
            rewards = self.rewards(visit)
            self.seen[visit] = row, rewards
            samples += [Sample(visit * len(rewards) + i, 9, 4, group=visit) for i in range(len(rewards))]
        random.shuffle(samples)
        buffer.add(samples)
        batch = RolloutBatch(step, {})
        batch.take(buffer.take(step))
        batch.rewards = {
            one.sample_id: self.seen[one.group][1][one.sample_id % len(self.seen[one.group][1])]
            for one in batch.samples
        }
        batch.records["reward"] = {one: {"reward": reward} for one, reward in batch.rewards.items()}
        return batch


def can_be_learnt_from(rewards):
    return len({reward for reward in rewards if reward is not None}) > 1


def step_of(state, engine):
    state.begin_step()
    refill = fill_step(state.first, state.step, engine)
    batch = RolloutBatch(state.step, {})
    refill.fill(batch)
    state.complete_step()
    return refill, batch


def check_step(engine, before, refill, batch, prompts):
    """The step has the first prompts that can be learnt from, with all their samples; all others are counted."""
    new = {visit: found for visit, found in engine.seen.items() if visit not in before}
    good = [visit for visit in sorted(new) if can_be_learnt_from(new[visit][1])]
    assert [*batch.visits] == good[:prompts] and len(good) >= prompts
    assert batch.visits == {visit: new[visit][0] for visit in good[:prompts]}
    assert [batch.rewards[one] for one in batch.sample_ids] == [
        reward for visit in good[:prompts] for reward in new[visit][1]
    ]
    assert [*batch.records["reward"]] == batch.sample_ids
    size = len(batch.samples) // prompts
    assert batch.sample_ids == [visit * size + i for visit in good[:prompts] for i in range(size)]
    unused = [visit * size + i for visit in new if visit not in batch.visits for i in range(size)]
    assert sorted(refill.unused) == sorted(unused)
    valid = [reward for _, rewards in new.values() for reward in rewards if reward is not None]
    counts = {name.removeprefix("dynamic_sampling/"): value for name, value in refill.metrics().items()}
    assert counts.pop("reward_mean") == pytest.approx(sum(valid) / len(valid))
    assert counts.pop("rounds") == refill.num_rounds
    assert counts == {
        "groups": len(new),
        "dropped": len(new) - len(good),
        "left_over": len(good) - prompts,
    }
    return [new[visit][0] for visit in new if visit not in good[prompts:]]


def test_each_pass_uses_each_row_once_whatever_the_rewards_are(job):
    """A thousand passes over data sets of 1 to 12 rows. Every step of every second run begins from a
    checkpoint, and gives what the run without does."""
    draw, passes = random.Random(5), 0
    for trial in range(60):
        sizes = {"rows": draw.randint(1, 12), "prompts": draw.randint(1, 6), "samples": draw.randint(2, 4)}
        sizes |= {"seed": trial, "shuffle": draw.random() < 0.7}
        share = draw.choice([0.3, 0.6, 1.0])
        state = job(**sizes)
        engine, used, history = Engine(state, trial, share), Counter(range(sizes["rows"])), []
        for _ in range(12):
            before = {*engine.seen}
            refill, batch = step_of(state, engine)
            used.update(check_step(engine, before, refill, batch, sizes["prompts"]))
            # rows that come back have been drawn, and not used: with them no row is two uses ahead of another
            drawn = used + Counter(state.first.given_rows)
            assert max(drawn.values()) - min(drawn.values()) <= 1
            assert state.first.given_rows == refill.left_over_rows
            history.append((batch.visits, batch.rewards, refill.metrics()))
        passes += min(used.values()) - 1
        again = None
        for visits, rewards, metrics in history if trial % 2 else ():
            snapshot = json.loads(json.dumps(again.snapshot())) if again else None
            again = job(**sizes)
            if snapshot:
                again.restore(snapshot)
            refill, batch = step_of(again, Engine(again, trial, share))
            assert (batch.visits, batch.rewards, refill.metrics()) == (visits, rewards, metrics)
    assert passes > 1200


def test_a_dropped_step_gives_back_the_rows_of_its_rounds(job):
    state = job(rows=9, prompts=3, samples=2)
    engine = Engine(state, 1, 0.5)
    while not state.first.given_rows:
        step_of(state, engine)
    before = state.snapshot()
    state.begin_step()
    fill_step(state.first, state.step, engine)
    assert state.snapshot() != before
    state.drop_step()
    assert state.snapshot() == before


def test_further_rounds_sample_twice_what_the_share_of_kept_prompts_asks_for(job):
    def batch_of(first, *kept):
        batch = RolloutBatch(1, {first + i: i for i in range(len(kept))})
        batch.samples = [
            Sample(2 * (first + i) + j, 9, 4, group=first + i) for i in range(len(kept)) for j in (0, 1)
        ]
        batch.rewards = {s.sample_id: float(s.sample_id % 2 * kept[s.group - first]) for s in batch.samples}
        return batch

    refill = Refill(num_prompts=8, max_rounds=4)
    assert refill.next_round(step=1) == 8
    refill.add(batch_of(0, *[False] * 8))
    assert refill.next_round(step=1) == 8  # nothing is known of the share
    refill.add(batch_of(8, *[True] * 6, False, False))
    assert refill.next_round(step=1) == 8  # 2 missing at a share of 6/16: 10.7
    refill.add(batch_of(16, True, *[False] * 7))
    assert refill.next_round(step=1) == 7  # 1 missing at 7/24: 6.9
    refill.add(batch_of(24, True, True))
    assert refill.next_round(step=1) == 0 and refill.left_over_rows == [1]


def test_rounds_that_are_not_enough_end_the_run_by_name(job):
    state = job(rows=5, prompts=2, samples=2, most_rounds=3)
    engine = Engine(state, 0, 0.0)
    engine.rewards = lambda visit: [1.0, 1.0]
    state.begin_step()
    with pytest.raises(DynamicSamplingError) as error:
        fill_step(state.first, state.step, engine)
    text = str(error.value)
    assert text.startswith("--max-sampling-rounds (3): step 1 needs 2 prompts whose samples have different")
    assert "has 0. 6 prompts were sampled, their mean reward 1." in text and "--max-sampling-rounds 6" in text
    assert [(len(visits), is_further) for visits, is_further in engine.rounds] == [
        (2, False),
        (2, True),
        (2, True),
    ]


def test_rows_of_the_callers_choice_are_refused(job):
    state = job(rows=5, prompts=2, samples=2)
    with pytest.raises(ValueError, match="rows: with --dynamic-sampling a step takes rows until"):
        state.first.admit([1, 2], step=1)
