"""The scheduler with real processes: torchrun, two ranks, a driver. `pytest
tests/runtime/test_flow_job.py`"""

import pytest

from tests.runtime.jobs import TORCHRUN, preloaded


@pytest.mark.timeout(120)
def test_a_flow_overlaps_and_ends_with_the_error_of_a_node(job):
    launched = job.start([*preloaded(TORCHRUN), "-m", "job_worker", "flows", str(job.folder)])
    assert launched.wait(100) == 1, job.stderr()
    seen = job.seen()
    # Two nodes that sleep 1 s on disjoint meshes: one after the other they take 2 s.
    assert 1.0 <= seen["overlap_run_s"] <= 1.2, seen
    assert seen["overlap_s"] > 0.8
    # A node on the ranks of both waits for both, and a rank that is free does other work before that.
    assert seen["order"] == {
        "0": ["left.sleep", "actor.sleep"],
        "1": ["right.first", "right.second", "actor.sleep"],
    }, seen
    # The background node sleeps 0.5 s on rank 1, the path is two calls on rank 0.
    assert seen["background_run_s"] < 0.3 and seen["closed_s"] > 0.3, seen
    assert seen["skipped"] == ["right.echo"]
    assert seen["subset"] == [[["only rank 1"], {}]]
    # 10 nodes through the scheduler, less the same 10 calls made by hand; 2 ms is promised, and 1 ms measured
    # on a quiet machine.
    assert seen["per_step_ms"] - seen["by_hand_ms"] < 10.0, seen
    assert (
        "[actor rank 1] update failed at step 7: ValueError: learning rate (-1) must be positive\n"
        in job.stderr()
    )
    assert job.wait_until_gone(10)
