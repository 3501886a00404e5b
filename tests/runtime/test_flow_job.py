"""The scheduler with real processes: torchrun, two ranks, a driver. `pytest
tests/runtime/test_flow_job.py`"""

import pytest

from tests.runtime.jobs import TORCHRUN, preloaded


@pytest.mark.timeout(120)
def test_a_flow_overlaps_and_ends_with_the_error_of_a_node(job):
    launched = job.start([*preloaded(TORCHRUN), "-m", "job_worker", "flows", str(job.folder)])
    assert launched.wait(100) == 1, job.stderr()
    seen = job.seen()
    # Two nodes that sleep 1 s on disjoint meshes.
    assert seen["overlap_s"] > 0, seen
    # A node on the ranks of both waits for both, and a rank that is free does other work before that.
    assert seen["order"] == {
        "0": ["left.sleep", "actor.sleep"],
        "1": ["right.first", "right.second", "actor.sleep"],
    }, seen
    assert seen["background_node_ended_after_the_run"] and seen["and_before_close_returned"], seen
    assert seen["skipped"] == ["right.echo"]
    assert seen["subset"] == [[["only rank 1"], {}]]
    assert (
        "[actor rank 1] update failed at step 7: ValueError: learning rate (-1) must be positive\n"
        in job.stderr()
    )
    assert job.wait_until_gone(10)
