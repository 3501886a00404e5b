"""What the driver hears of an engine that was started again, at its first weight sync.

pytest tests/workers/test_leaving_engine.py"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megarl.flow.events import ENGINE_CHANGED, EngineChange
from megarl.rollout.engine_errors import EngineFailed
from megarl.rollout.processes import EngineDied
from megarl.workers.leaving_engine import LeavingEngine
from megarl.workers.pinned_engine import PinnedEngine
from megarl.workers.rollout import RolloutRole


class Restartable:
    """An engine that has ended."""

    may_leave, is_pinned, inference = True, False, None

    def __init__(self) -> None:
        self.failure: Exception | None = EngineDied("the first death")

    def restart(self) -> None:
        self.failure = None


@pytest.fixture
def role() -> LeavingEngine:
    """The rank of an engine that has left; `events` are those that it emits."""
    role = LeavingEngine.__new__(LeavingEngine)
    role.rank, role.name, role.has_left, role.engine = 0, "rollout", True, Restartable()
    role.mesh = SimpleNamespace(coordinates=lambda rank: {"dp": 0}, dp=2)
    role.stream = SimpleNamespace(go_on=lambda: None)
    role.recorder = SimpleNamespace(use=lambda engine: None, is_started=True)
    role.events = []
    role.context = SimpleNamespace(emit=lambda kind, change: role.events.append((kind, change)))
    return role


def test_an_engine_that_was_started_again_is_live_with_its_first_weights(role):
    assert role.start_engine() == "" and role.is_joining and not role.has_engine
    role.complete_sync(3)
    assert role.events == [(ENGINE_CHANGED, EngineChange("rollout", 0, True))]
    assert role.has_engine and not role.is_joining


def test_an_engine_that_fails_at_its_first_sync_after_a_start_has_left_again(role):
    """Otherwise it would join for ever, and nobody could ask for it again."""
    assert role.start_engine() == ""
    role.engine.failure = EngineDied("the second death")
    for version in (3, 4):  # told once
        role.complete_sync(version)
        assert role.events == [(ENGINE_CHANGED, EngineChange("rollout", 0, False, "the second death"))]
        assert not role.has_engine and not role.is_joining
    assert role.start_engine() == "" and role.is_joining


@pytest.mark.parametrize("error", [EngineFailed("killed"), OSError("no memory"), ValueError("no GPU")])
def test_an_engine_that_cannot_be_started_again_costs_the_others_nothing(role, error, monkeypatch):
    def restart() -> None:
        raise error

    monkeypatch.setattr(role.engine, "restart", restart)
    assert role.start_engine() == str(error) and role.has_left and not role.is_joining


@pytest.mark.parametrize("may_leave", [True, False])
def test_an_engine_that_has_ended_lets_its_rank_shut_down(role, may_leave, tmp_path):
    """After the last step a job may not need it any more."""

    def abort() -> None:
        raise EngineDied("killed during the last export")

    closed = []
    role.__class__ = RolloutRole
    role.has_left, role.engine.failure, role.engine.may_leave = False, None, may_leave
    role.engine.leave = role.engine.shutdown = lambda *_: closed.append("engine")
    role.config = SimpleNamespace(run=SimpleNamespace(save=str(tmp_path)))
    role.stream = SimpleNamespace(abort=abort, give_up=lambda path: None)
    role.recorder = SimpleNamespace(close=lambda: closed.append("recorder"))
    role.episodes = SimpleNamespace(close=lambda: closed.append("episodes"))
    if may_leave:
        role.shut_down()
    else:
        with pytest.raises(EngineDied):
            role.shut_down()
    assert closed == ["engine"] * may_leave + ["recorder", "episodes", "engine"]


def test_an_engine_that_has_left_is_not_pinned(role):
    """Otherwise it would get no weights at the sync after its start. It may leave just before it is pinned."""
    PinnedEngine.set_pinned(role, True)
    assert not role.engine.is_pinned
    role.has_left = False
    PinnedEngine.set_pinned(role, True)
    assert role.engine.is_pinned
