"""The wait for the groups of a step: its end, its seconds, and its deadline.

    pytest tests/trainer/test_group_future.py

The executor is real; the clock of the wait is the test's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megarl.futures import Future
from megarl.runtime.executor import CallTimeout
from megarl.runtime.inline_executor import InlineExecutor
from megarl.trainer import group_future, step_runner
from megarl.trainer.group_future import GroupFuture
from megarl.trainer.step_runner import StepRunner


class Queueing:
    """A rollout role whose calls return before their samples are finished."""

    def generate(self) -> list:
        return []


class Wait:
    """A wait at step 3 with a clock of its own, and the number of samples reported so far."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.num_reported, self.is_ready = 100.0, 0, False
        monkeypatch.setattr(group_future, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.executor = InlineExecutor({"rollout": Queueing()})
        self.executor.label, self.executor.call_timeout_s = "step 3", 30.0
        self.call: Future = self.executor.call("rollout", "generate")
        self.future = GroupFuture(
            self.executor, self.call, lambda: self.is_ready, lambda: self.num_reported, [0, 1]
        )

    def look(self, seconds: float, times: int = 1) -> bool:
        """Look so many times whether the groups are there, after so many seconds each."""
        for _ in range(times):
            self.now += seconds
            done = self.future.done()
        return done


@pytest.fixture
def wait(monkeypatch) -> Wait:
    return Wait(monkeypatch)


def test_the_result_is_that_of_the_call_and_comes_with_the_groups(wait):
    assert not wait.look(1.0) and not wait.look(1.5)
    wait.is_ready = True
    assert wait.look(0.5) and wait.future.result() == [[]]
    assert wait.future.role == "rollout"
    assert wait.future.seconds == pytest.approx(3.0)
    assert wait.future.waited_s == pytest.approx(3.0 - wait.call.seconds)
    assert wait.future.ended == pytest.approx(wait.call.ended + wait.future.waited_s)
    wait.is_ready = False
    assert wait.look(5.0) and wait.future.seconds == pytest.approx(3.0)  # it stays done


def test_groups_that_are_there_cost_no_seconds_of_waiting(wait):
    wait.is_ready = True
    assert wait.look(7.0)  # the driver did other things first
    assert wait.future.waited_s == 0.0 and wait.future.seconds == wait.call.seconds


def test_the_seconds_of_canaries_are_not_counted_beside_the_wait_that_has_them(wait, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        step_runner, "metrics_of_actors", lambda batches, state, reports, seconds: seen.update(seconds) or {}
    )
    result = SimpleNamespace(node=SimpleNamespace(method="generate"), role="rollout", future=wait.future)
    for waits in (False, True):
        seconds = {("rollout", "generate"): 0.25, ("rollout", "sample_canaries"): 2.0}
        runner = SimpleNamespace(
            batches=SimpleNamespace(of_actor={}),
            executor=SimpleNamespace(take_seconds=lambda: seconds),
            early=SimpleNamespace(roles=()),
            results={"generate": result},
            state=None,
        )
        wait.future.waited_s = 3.0 if waits else 0.0
        StepRunner.metrics(runner, [])
        total = seen.pop(("rollout", "generate")) + seen.pop(("rollout", "sample_canaries"), 0.0)
        assert total == (3.25 if waits else 2.25)


def test_engines_that_report_nothing_are_a_timeout_that_names_their_ranks(wait):
    assert not wait.look(1.0, times=30)
    with pytest.raises(CallTimeout) as raised:
        wait.look(1.0)
    assert str(raised.value).startswith(
        "[rollout] generate timed out at step 3: no answer from ranks 0, 1 within call_timeout_s (30 s)."
    )
    assert wait.executor.failure is raised.value
    with pytest.raises(CallTimeout):  # nothing goes on after it
        wait.executor.call("rollout", "generate")


def test_each_report_begins_the_deadline_anew(wait):
    for _ in range(4):
        assert not wait.look(1.0, times=29)
        wait.num_reported += 1
    assert not wait.look(1.0)  # sees the last report
    assert not wait.look(1.0, times=30)
    with pytest.raises(CallTimeout):
        wait.look(1.0)


def test_a_driver_that_was_stopped_does_not_blame_the_engines(wait):
    for _ in range(10):
        assert not wait.look(10_000.0)  # counts as 2 s each
    assert not wait.look(1.0, times=10)
    with pytest.raises(CallTimeout):
        wait.look(1.0)
