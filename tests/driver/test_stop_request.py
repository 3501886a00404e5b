"""When a request to stop interrupts the loop. `pytest tests/driver/test_stop_request.py`"""

import pytest

from megarl.runtime.stop_request import StopRequest, StopRequested


@pytest.fixture
def stop():
    stop = StopRequest()
    stop.is_armed = True
    return stop


def test_a_step_without_an_update_is_dropped_at_the_next_call_or_wait(stop):
    stop.before_call("generate")
    stop.check()
    stop.request()
    for look in (stop.check, lambda: stop.before_call("score"), lambda: stop.before_call("update")):
        with pytest.raises(StopRequested):
            look()


def test_from_its_first_update_on_a_step_is_finished(stop):
    stop.before_call("update")
    stop.request()
    stop.before_call("sync")
    stop.check()
    stop.step_is_whole()
    with pytest.raises(StopRequested):
        stop.before_call("export_hf")


def test_what_must_not_be_done_by_halves_is_not_interrupted(stop):
    stop.request()
    with stop.held():
        with stop.held():
            stop.before_call("begin_checkpoint")
        stop.check()
    with pytest.raises(StopRequested):
        stop.check()


def test_nobody_who_does_not_see_to_it_is_interrupted():
    stop = StopRequest()
    stop.request()
    stop.check()
    stop.before_call("setup")
