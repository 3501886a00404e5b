"""When a request to stop interrupts the loop. `pytest tests/trainer/test_stop_request.py`"""

import pytest

from megarl.trainer.stop_request import StopRequest, StopRequested


@pytest.fixture
def stop():
    stop = StopRequest()
    stop.is_armed = True
    return stop


def test_a_step_without_an_update_is_dropped_at_the_next_call_or_wait(stop):
    stop.check()
    stop.request()
    for look in (stop.check, stop.begin_update):
        with pytest.raises(StopRequested):
            look()


def test_from_its_first_update_on_a_step_is_finished(stop):
    stop.begin_update()
    stop.request()
    stop.begin_update()
    stop.check()
    stop.step_completed()
    with pytest.raises(StopRequested):
        stop.check()


def test_what_must_not_be_done_by_halves_is_not_interrupted(stop):
    stop.request()
    with stop.held():
        with stop.held():
            stop.check()
        stop.check()
    with pytest.raises(StopRequested):
        stop.check()


def test_nobody_who_does_not_see_to_it_is_interrupted():
    stop = StopRequest()
    stop.request()
    stop.check()
