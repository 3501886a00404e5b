"""What happens to an engine is logged, and a replay repeats it at the same engine steps, or says what differs.

    pytest tests/workers/test_engine_recorder.py

The engine is a small one whose every token depends on all that it was given and when."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megarl.rollout.replay_log import Admit, Checkpoint, Commit, Evaluate, ReplayError, read_log
from megarl.workers import engine_recorder
from megarl.workers.engine_recorder import EngineRecorder

LENGTH = 7


class Engine:
    """Samples for each request LENGTH tokens, which depend on the step, the version and the other requests.

    Args:
        process: not None for an engine that steps by itself, here up to three steps whenever it is asked."""

    def __init__(self, process: str | None) -> None:
        self.process, self.num_steps, self.version = process, 0, 0
        self.left: dict[int, int] = {}
        self.tokens: list[int] = []
        self.held_at: int | None = None
        self.is_paused = False
        self.rng = random.Random()

    def has_unfinished(self) -> bool:
        return bool(self.left)

    def hold(self, step: int | None) -> None:
        assert step is None or step >= self.num_steps
        self.held_at = step

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def add(self, visits: tuple[int, ...]) -> None:
        self.left |= dict.fromkeys(visits, LENGTH)

    def step(self) -> None:
        for _ in range(self.rng.randrange(4) if self.process else 1):
            if self.left and not self.is_paused and self.num_steps != self.held_at:
                self.num_steps += 1
                self.tokens.append(hash((self.num_steps, self.version, *self.left.items())))
                self.left = {visit: left - 1 for visit, left in self.left.items() if left > 1}


class Job:
    """Steps of training: prompts enter, the engine goes on for a while, and weights follow.

    Args:
        late: training step whose weights are committed although the engine has made one more step."""

    def __init__(self, folder: Path, process: str | None, replay: Path | None = None, late: int = -1) -> None:
        self.engine, self.late = Engine(process), late
        step = self.engine.step
        self.recorder = EngineRecorder(self.engine, step, "rollout_0", folder, replay, timeout_s=0.3)
        self.recorder.start(0)

    def idle(self, rng: random.Random) -> None:
        for _ in range(rng.randrange(6)):
            if not self.recorder.is_held():
                self.engine.step()

    def run(self, num_steps: int, seed: int, evaluates: bool = True) -> list[int]:
        rng, engine, recorder = random.Random(seed), self.engine, self.recorder
        for step in range(1, num_steps + 1):
            visits = (2 * step, 2 * step + 1)
            with recorder.taking_effect(Admit(step=step, version=step - 1, visits=visits)):
                engine.add(visits)
            self.idle(rng)
            recorder.catch_up()
            if step == self.late:
                engine.hold(None)
                engine.add((99,))
                done = engine.num_steps
                while engine.num_steps == done:
                    engine.step()
            with recorder.taking_effect(Commit(step=step, version=step)):
                engine.version = step
            if evaluates and step % 2 == 0:
                with recorder.taking_effect(Evaluate(step=step, version=step, visits=(100 + step,))):
                    engine.add((100 + step,))
                while 100 + step in engine.left:
                    engine.step()
            self.idle(rng)
        recorder.close()
        return engine.tokens


@pytest.mark.parametrize("process", [None, "engine of rank 0"])
def test_a_replay_is_the_run_whatever_its_timing(tmp_path, process):
    first = Job(tmp_path / "run", process).run(9, seed=0)
    free = Job(tmp_path / "free", process).run(9, seed=1)
    assert free != first
    for seed in range(10):
        again = Job(tmp_path / f"{seed}", process, replay=tmp_path / "run")
        tokens = again.run(9, seed)
        common = min(len(tokens), len(first))  # after the last record each goes on as long as it is asked to
        assert tokens[:common] == first[:common] and common > 40
        assert read_log(tmp_path / f"{seed}", "rollout_0") == read_log(tmp_path / "run", "rollout_0")


@pytest.mark.parametrize("process", [None, "engine of rank 0"])
def test_a_commit_that_is_one_engine_step_late_is_named(tmp_path, process):
    Job(tmp_path / "run", process).run(5, seed=3)
    with pytest.raises(ReplayError, match=r"\"kind\":\"commit\".* is next there, and the engine is at step"):
        Job(tmp_path / "again", process, tmp_path / "run", late=2).run(5, seed=3)


def test_a_job_that_does_something_else_is_told_what(tmp_path):
    Job(tmp_path / "run", None).run(4, seed=0)
    with pytest.raises(
        ReplayError, match=r"goes on with .*\"evaluate\".*, and this job, .* with .*\"admit\""
    ):
        Job(tmp_path / "again", None, tmp_path / "run").run(4, seed=0, evaluates=False)
    other = Job(tmp_path / "other", None, tmp_path / "run").recorder
    with (
        pytest.raises(ReplayError, match=r"\"visits\":\[2,3\].* with .*\"visits\":\[9\]"),
        other.taking_effect(Admit(step=1, version=0, visits=(9,))),
    ):
        pass


@pytest.mark.parametrize(
    "visits, is_paused, error", [((), False, "has nothing left to do at step 0"), ((1,), True, "is stuck at step 0")]
)  # fmt: skip
def test_an_engine_that_never_reaches_the_step_is_named(tmp_path, monkeypatch, visits, is_paused, error):
    monkeypatch.setattr(engine_recorder, "_IDLE_S", 0.1)
    log = engine_recorder.ReplayLog(tmp_path / "run", "rollout_0", 0)
    log.write(Commit(step=1, engine_step=3, version=1))
    log.close()
    job = Job(tmp_path / "again", None, tmp_path / "run")
    job.engine.add(visits)
    job.engine.is_paused = is_paused
    with pytest.raises(ReplayError, match=error):
        job.recorder.catch_up()


def test_a_resumed_job_repeats_what_follows_its_checkpoint(tmp_path):
    log = engine_recorder.ReplayLog(tmp_path / "run", "rollout_0", 0)
    log.write(Checkpoint(step=4, engine_step=30), Commit(step=5, engine_step=33, version=5))
    log.close()
    engine = Engine("engine of rank 0")
    recorder = EngineRecorder(engine, engine.step, "rollout_0", None, tmp_path / "run", timeout_s=0.3)
    recorder.start(4)
    assert engine.held_at == 3
    engine.add((1,))
    with recorder.committing(5):
        assert engine.num_steps == 3 and engine.is_paused
    assert engine.held_at is None and not engine.is_paused
