"""An engine hangs when it takes longer than 10 s and than ten of its longest steps.

pytest tests/rollout/test_patience.py"""

from __future__ import annotations

import time

import pytest

from megarl.rollout import patience
from megarl.rollout.patience import Patience


def test_the_limit_follows_the_longest_step():
    one = Patience()
    assert one.limit_s == 60.0  # the first step may compile kernels
    for seconds, limit_s in ((0.5, 10.0), (3.0, 30.0), (0.1, 30.0)):
        one.note_step(seconds)
        assert one.limit_s == limit_s


def test_answers_before_the_first_step_do_not_shorten_its_limit():
    one = Patience()
    for seconds, limit_s in ((0.001, 60.0), (7.0, 70.0)):
        one.note_wait(seconds)
        assert one.limit_s == limit_s
    one = Patience()
    one.note_wait(0.001)
    one.note_step(0.5)
    assert one.limit_s == 10.0


def test_waiting_ends_with_an_answer_or_when_the_time_is_over(monkeypatch):
    monkeypatch.setattr(patience, "_SLICE_S", 0.02)
    asked: list[float] = []

    def poll(seconds: float) -> bool:
        asked.append(seconds)
        time.sleep(seconds)
        return len(asked) == 3

    assert Patience().wait(poll, 1.0) == (True, pytest.approx(0.06, abs=0.005))
    assert asked == [0.02] * 3
    is_there, waited_s = Patience().wait(lambda seconds: time.sleep(seconds), 0.05)
    assert not is_there and waited_s == pytest.approx(0.05, abs=1e-6)
    assert Patience().wait(lambda seconds: True, 0.0) == (True, 0.0)


def test_a_stop_of_this_process_does_not_count(monkeypatch):
    monkeypatch.setattr(patience, "_SLICE_S", 0.01)
    looks = 0

    def poll(seconds: float) -> bool:
        nonlocal looks
        looks += 1
        time.sleep(0.1)  # as if the process was stopped meanwhile
        return False

    assert Patience().wait(poll, 0.03) == (False, pytest.approx(0.03, abs=1e-6)) and looks == 3
