"""Every admitted prompt is trained on once, whatever the order, the delay and the size of its group.

pytest tests/trainer/test_buffer.py"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.packing import Sample
from megarl.trainer.buffer import SampleBufferError, SampleBuffer


def samples_of(visit: int, num_samples: int) -> list[Sample]:
    """Samples of one group. Ids are unique over all visits, as no group here has more than ten."""
    return [Sample(10 * visit + index, 5, 3, group=visit) for index in range(num_samples)]


def test_synchronous_training_takes_all_that_was_admitted():
    buffer = SampleBuffer()
    buffer.admit({4: 17, 5: 3}, num_samples=2, step=1)
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
    buffer = SampleBuffer()
    buffer.admit({4: 17}, num_samples=2, step=1)
    buffer.issue()
    buffer.admit({7: 18}, num_samples=2, step=1)
    with pytest.raises(SampleBufferError, match=error):
        buffer.add(samples)


def test_a_visit_is_admitted_once():
    buffer = SampleBuffer()
    buffer.admit({4: 17}, num_samples=2, step=1)
    with pytest.raises(SampleBufferError, match="visit 4 is admitted a second time"):
        buffer.admit({4: 17}, num_samples=2, step=2)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_late_groups_of_any_size_are_taken_once(data):
    """Engines finish groups in any order, some of them up to `staleness` steps late; the run is restored from a
    snapshot in between, and what was not trained on is sampled anew with the same ids."""
    staleness, num_steps = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 6))
    restored_at = data.draw(st.integers(0, num_steps))
    buffer, sizes, in_engine, taken, next_visit = SampleBuffer(staleness), {}, {}, [], 0
    for step in range(1, num_steps + 1):
        if step == restored_at:
            groups = json.loads(json.dumps(buffer.snapshot()))
            buffer, in_engine = SampleBuffer(staleness), {}
            buffer.restore(groups)
        new = {next_visit + i: data.draw(st.integers(0, 99)) for i in range(data.draw(st.integers(0, 4)))}
        next_visit += len(new)
        sizes |= {visit: data.draw(st.integers(1, 5)) for visit in new}
        buffer.admit(new, {visit: sizes[visit] for visit in new}, step)
        for visit in buffer.issue():
            in_engine[visit] = data.draw(st.integers(0, staleness))
        admitted_for = {group["visit"]: group["step"] for group in buffer.snapshot()}
        finished = [
            visit
            for visit, delay in in_engine.items()
            if delay == 0 or admitted_for[visit] + staleness <= step
        ]
        in_engine = {visit: delay - 1 for visit, delay in in_engine.items() if visit not in finished}
        samples = [sample for visit in finished for sample in samples_of(visit, sizes[visit])]
        buffer.add(data.draw(st.permutations(samples)))
        groups = buffer.take(step)
        assert all(len(group.samples) == sizes[group.visit] for group in groups)
        assert all(step - group.step <= staleness for group in groups)
        taken += [group.visit for group in groups]
    waiting = [group["visit"] for group in buffer.snapshot()]
    assert sorted(taken + waiting) == list(range(next_visit))
