"""Every admitted prompt is trained on once, whatever the order, the delay and the size of its group.

pytest tests/trainer/test_buffer.py"""

from __future__ import annotations


import pytest
from megarl.packing import Sample
from megarl.trainer.buffer import SampleBufferError, SampleBuffer


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
