"""The state of a run: one step number, and a snapshot from which the same run goes on.

pytest tests/trainer/test_state.py"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megarl.config.hf_config import ModelShape
from megarl.trainer.preflight import Inputs
from megarl.trainer.state import TrainState
from tests.trainer.test_actor_state import config


@pytest.fixture
def state(tmp_path):
    one = config(tmp_path)
    one = replace(one, batch=replace(one.batch, train_iters=9))
    return TrainState(one, {"": Inputs(ModelShape.load(one.model.model), range(7), None)})


def admit_step(state: TrainState) -> dict[int, int]:
    state.begin_step()
    state.first.admit(None, state.step)
    visits = state.first.buffer.issue()
    state.first.buffer.restore(())
    return visits


def test_a_step_counts_when_it_is_completed(state):
    assert (state.step, state.completed, state.in_step) == (0, 0, False)
    state.begin_step()
    assert (state.step, state.completed, state.in_step) == (1, 0, True)
    state.complete_step()
    assert (state.step, state.completed, state.in_step) == (1, 1, False)


def test_a_step_without_an_update_is_refused_where_samples_become_too_old(state):
    state.begin_step()
    state.check_left_out()
    stale = replace(state.first.config.streaming, staleness=1)
    state.first.config = replace(state.first.config, streaming=stale)
    with pytest.raises(ValueError, match="step 1 has ended without an update. With --staleness 1 every step"):
        state.check_left_out()


def test_a_dropped_step_leaves_the_state_as_it_was(state):
    admit_step(state)
    state.first.zero_reward_steps, state.first.equal_reward_steps = 3, 5
    state.complete_step()
    before = state.snapshot()
    visits = admit_step(state)
    state.first.zero_reward_steps, state.first.equal_reward_steps = 4, 6
    state.drop_step()
    assert state.snapshot() == before and state.step == 1
    assert admit_step(state) == visits
    state.complete_step()
    completed = state.snapshot()
    state.drop_step()  # between two steps there is nothing to drop
    assert state.snapshot() == completed


def test_a_snapshot_restores_step_rows_and_what_waits_in_the_buffer(state, tmp_path):
    admit_step(state)
    state.complete_step()
    state.first.admit([3, 4], step=2)
    saved = json.loads(json.dumps(state.snapshot()))
    waiting, rows = state.first.buffer.issue(), state.first.cursor.next_visits(9)
    other = TrainState(state.first.config, {"": Inputs(state.first.shape, range(7), None)})
    other.restore(saved)
    assert (other.step, other.in_step) == (1, False)
    assert other.first.buffer.issue() == waiting == {2: 3, 3: 4}
    assert other.first.cursor.next_visits(9) == rows
