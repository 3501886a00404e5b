"""Every admitted prompt is trained on once, whatever the order, the delay and the size of its group.

pytest tests/trainer/test_buffer.py"""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megarl.packing import Sample
from megarl.trainer.buffer import SampleBuffer, SampleBufferError
from tests.trainer.simulated_rollouts import Scenario, SimulatedRun


def samples_of(visit: int, num_samples: int) -> list[Sample]:
    """Samples of one group. Ids are unique over all visits, as no group here has more than ten."""
    return [Sample(10 * visit + index, 5, 3, group=visit) for index in range(num_samples)]


def test_synchronous_training_takes_all_that_was_admitted():
    buffer = SampleBuffer(num_prompts=2)
    buffer.admit({4: 17, 5: 3}, num_samples=2, version=0)
    assert buffer.issue() == {4: 17, 5: 3} and buffer.issue() == {}
    buffer.add([*samples_of(5, 2), *samples_of(4, 1)])
    with pytest.raises(
        SampleBufferError, match="1 of 2 samples of visit 4 are missing: groups must be complete"
    ):
        buffer.take(step=1)
    buffer.add(samples_of(4, 2)[1:])
    groups = buffer.take(step=1)
    assert [(group.visit, group.row, sorted(group.samples)) for group in groups] == [
        (4, 17, [40, 41]),
        (5, 3, [50, 51]),
    ]
    assert len(buffer) == 0 and buffer.take(step=2) == []


@pytest.mark.parametrize(
    "samples, error",
    [
        (samples_of(6, 1), "sample 60 belongs to no prompt that is being sampled"),
        (samples_of(4, 1) * 2, "sample 40 was sampled more than once"),
        (samples_of(4, 3), "sample 42 is one more than the 2 of visit 4"),
        (samples_of(7, 1), "sample 70 belongs to no prompt that is being sampled"),  # admitted, not issued
    ],
)
def test_a_sample_that_nobody_waits_for_is_an_error(samples, error):
    buffer = SampleBuffer(num_prompts=2)
    buffer.admit({4: 17}, num_samples=2, version=0)
    buffer.issue()
    buffer.admit({7: 18}, num_samples=2, version=0)
    with pytest.raises(SampleBufferError, match=error):
        buffer.add(samples)


def test_a_visit_is_admitted_once():
    buffer = SampleBuffer(num_prompts=2)
    buffer.admit({4: 17}, num_samples=2, version=0)
    with pytest.raises(SampleBufferError, match="visit 4 is admitted a second time"):
        buffer.admit({4: 17}, num_samples=2, version=1)


SCENARIOS = st.builds(
    Scenario,
    num_prompts=st.integers(1, 4),
    staleness=st.integers(0, 4),
    in_order=st.booleans(),
    train_iters=st.integers(1, 9),
    group_size=st.integers(1, 3),
    num_engines=st.integers(1, 3),
    pins=st.sampled_from([0.0, 0.3, 0.8]),
    max_num_seqs=st.integers(1, 4),
    has_long_tail=st.booleans(),
    max_tokens=st.none() | st.integers(1, 3),
    accidents=st.sampled_from([0.0, 0.1, 0.3]),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=200, deadline=None)
@given(SCENARIOS)
def test_no_token_is_too_old_and_no_prompt_is_lost(scenario):
    SimulatedRun(scenario).run()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@settings(max_examples=50_000, deadline=None)
@given(SCENARIOS)
def test_no_token_is_too_old_and_no_prompt_is_lost_in_many_runs(scenario):
    SimulatedRun(scenario).run()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_step_waits_no_longer_than_it_must(data):
    """A step is ready as soon as any choice of finished groups lets every other group be trained on in time."""
    num_prompts, staleness, version = (data.draw(st.integers(*limits)) for limits in ((1, 3), (1, 2), (0, 3)))
    buffer, step, slots = SampleBuffer(num_prompts, staleness), version + 1, (staleness + 1) * num_prompts
    versions = sorted(data.draw(st.lists(st.integers(0, version), min_size=num_prompts, max_size=slots)))
    for visit, admitted_at in enumerate(versions):
        buffer.admit({visit: 0}, 1, admitted_at)
    buffer.issue()
    finished = data.draw(st.sets(st.sampled_from(range(len(versions)))))
    buffer.add(sample for visit in finished for sample in samples_of(visit, 1))

    def in_time(left: list[int], step: int) -> bool:
        later = [left[i : i + num_prompts] for i in range(0, len(left), num_prompts)]
        return all(
            number - 1 - versions[visit] <= staleness for number, of in enumerate(later, step) for visit in of
        )

    if not in_time([*range(len(versions))], step):
        with pytest.raises(SampleBufferError, match=r"comes too late for it\. Resume with the --staleness"):
            buffer.take(step)
        return
    choices = [
        chosen
        for chosen in combinations(sorted(finished), num_prompts)
        if in_time([visit for visit in range(len(versions)) if visit not in chosen], step + 1)
    ]
    assert buffer.is_ready(step) == bool(choices)
    if choices:
        assert tuple(group.visit for group in buffer.take(step)) == min(choices)  # the oldest


def test_a_late_group_is_overtaken_once_and_then_waited_for():
    buffer = SampleBuffer(num_prompts=1, staleness=2)
    buffer.admit({0: 7, 1: 8, 2: 9}, num_samples=1, version=0)
    buffer.issue()
    buffer.add(samples_of(1, 1))
    assert [group.visit for group in buffer.take(step=1)] == [1]
    buffer.admit({3: 10}, num_samples=1, version=1)
    buffer.issue()
    buffer.add(samples_of(3, 1))
    # Visits 0 and 2 must be trained on by step 3, so step 2 cannot take visit 3.
    assert not buffer.is_ready(step=2) and [group.visit for group in buffer.due(step=2)] == [0]
    with pytest.raises(SampleBufferError, match="1 of 1 samples of visit 0 are missing"):
        buffer.take(step=2)
    buffer.add(samples_of(2, 1))
    assert buffer.due(step=2) == [] and [group.visit for group in buffer.take(step=2)] == [2]


def test_in_order_a_step_takes_the_oldest_groups():
    buffer = SampleBuffer(num_prompts=1, staleness=1, in_order=True)
    buffer.admit({0: 7, 1: 8}, num_samples=1, version=0)
    buffer.issue()
    buffer.add(samples_of(1, 1))
    assert not buffer.is_ready(step=1)
    buffer.add(samples_of(0, 1))
    assert [buffer.take(step)[0].visit for step in (1, 2)] == [0, 1]


def test_admission_keeps_to_the_slots_and_the_last_step():
    buffer = SampleBuffer(num_prompts=4, staleness=2)
    assert [buffer.num_to_admit(version=0, last_step=last) for last in (9, 3, 2, 0)] == [12, 12, 8, 0]
    with pytest.raises(
        SampleBufferError, match=r"13 prompts are admitted at version 0, but 12 of the 12 slots"
    ):
        buffer.admit(dict.fromkeys(range(13), 0), 1, version=0)
    buffer.admit(dict.fromkeys(range(12), 0), 1, version=0)
    assert buffer.num_to_admit(version=0, last_step=9) == 0
    with pytest.raises(
        SampleBufferError, match=r"1 prompts are admitted at version 1, but 0 of the 12 slots"
    ):
        buffer.admit({12: 0}, 1, version=1)


def test_synchronous_steps_may_have_any_number_of_prompts():
    buffer = SampleBuffer(num_prompts=2)
    buffer.admit(dict.fromkeys(range(5), 0), 1, version=3)
    assert buffer.num_to_admit(version=3, last_step=9) == 0
    buffer.issue()
    buffer.add(sample for visit in range(5) for sample in samples_of(visit, 1))
    assert len(buffer.take(step=4)) == 5
    assert buffer.num_to_admit(version=4, last_step=9) == 2


def test_a_step_with_too_few_prompts_is_an_error_and_not_a_wait():
    buffer = SampleBuffer(num_prompts=2, staleness=1)
    buffer.admit({0: 7}, num_samples=1, version=0)
    buffer.issue()
    assert not buffer.is_ready(step=1)
    buffer.add(samples_of(0, 1))
    for call in (buffer.is_ready, buffer.take):
        with pytest.raises(SampleBufferError, match="step 1 needs 2 prompts, but 1 are admitted"):
            call(1)


def test_the_groups_of_a_lost_engine_keep_their_finished_samples():
    buffer = SampleBuffer(num_prompts=2, staleness=1)
    buffer.admit({0: 7, 1: 8, 2: 9}, num_samples=2, version=0)
    assert buffer.issue(engines=[0, 0, 1]) == {0: 7, 1: 8, 2: 9}
    buffer.add([*samples_of(0, 2), *samples_of(1, 1)])
    assert [group.visit for group in buffer.lose_engine(0)] == [1]
    assert [(group.visit, [*group.samples]) for group in buffer.waiting()] == [(1, [10])]
    with pytest.raises(SampleBufferError, match="sample 11 belongs to no prompt that is being sampled"):
        buffer.add(samples_of(1, 2)[1:])
    buffer.issue(engines=[1])
    buffer.add(samples_of(1, 2)[1:])
    assert [group.engine for group in buffer.take(step=1)] == [0, 1]


def test_new_prompts_go_to_the_engines_with_fewer_unfinished_samples():
    buffer = SampleBuffer(num_prompts=4, staleness=1)
    buffer.admit({visit: visit for visit in range(4)}, num_samples=4, version=0)
    assert buffer.engines(2) == [0, 0, 1, 1]
    buffer.issue([0, 0, 1, 1])
    # Engine 0 has nothing left, engine 1 eight samples: two groups are as much, and the rest is shared.
    buffer.add([*samples_of(0, 4), *samples_of(1, 4)])
    buffer.admit({visit: visit for visit in range(4, 8)}, num_samples=4, version=0)
    assert buffer.engines(2) == [0, 0, 0, 1]


def test_groups_of_a_checkpoint_keep_their_engines_and_count_as_load():
    saved = SampleBuffer(num_prompts=4, staleness=1)
    saved.admit({visit: visit for visit in range(8)}, num_samples=2, version=0)
    saved.issue([0, 0, 0, 0, 1, 2, 2, 2])
    buffer = SampleBuffer(num_prompts=4, staleness=1)
    buffer.restore(saved.snapshot())
    assert buffer.engines(3) == [0, 0, 0, 0, 1, 2, 2, 2]
    # Engine 2 is gone. Its three groups go to engine 1, which has one group where engine 0 has four.
    assert buffer.engines(2) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert buffer.engines(1) == [0] * 8


def test_a_replayed_step_takes_what_the_first_run_took():
    buffer = SampleBuffer(num_prompts=1, staleness=1)
    buffer.replayed = {1: [1], 2: [5]}
    buffer.admit({0: 7, 1: 8}, num_samples=1, version=0)
    buffer.issue()
    buffer.add(samples_of(0, 1))
    assert not buffer.is_ready(step=1) and [group.visit for group in buffer.due(step=1)] == [1]
    buffer.add(samples_of(1, 1))
    assert [group.visit for group in buffer.take(step=1)] == [1]
    with pytest.raises(SampleBufferError, match="step 2 of the replayed run took visit 5: not admitted here"):
        buffer.is_ready(step=2)


def test_a_checkpoint_without_samples_is_sampled_again():
    """Checkpoints had the step of admission before they had versions and samples."""
    buffer = SampleBuffer(num_prompts=1)
    buffer.restore([{"visit": 4, "row": 17, "num_samples": 2, "step": 3}])
    assert [(group.version, group.samples) for group in buffer.groups] == [(2, {})]
    assert buffer.issue() == {4: 17}
    buffer.add(samples_of(4, 2))
    assert [group.visit for group in buffer.take(step=3)] == [4]


def test_a_checkpoint_of_a_larger_staleness_is_refused():
    buffer = SampleBuffer(num_prompts=1, staleness=2)
    buffer.admit({0: 7, 1: 8, 2: 9}, num_samples=1, version=0)
    buffer.issue()
    buffer.add(sample for visit in range(3) for sample in samples_of(visit, 1))
    for num_prompts, staleness in ((1, 1), (1, 0)):
        other = SampleBuffer(num_prompts, staleness)
        other.restore(buffer.snapshot())
        other.issue()
        other.add(sample for visit in range(3) for sample in samples_of(visit, 1))
        with pytest.raises(SampleBufferError, match=r"Resume with the --staleness and --num-prompts of the"):
            other.is_ready(step=2)
