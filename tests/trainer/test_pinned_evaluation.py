"""An evaluation beside training has the scores of one that everything waits for, of one version of the weights.

    pytest tests/trainer/test_pinned_evaluation.py

The driver's part is the real one. Ranks and engines are simulated: they take the driver's calls in order, each at a
random time, and an engine answers one held-out row per step with the version of its weights."""

from __future__ import annotations

import functools
import random
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms import REGISTRY
from megarl.config.mesh import MeshSpec
from megarl.config.schema import StreamingConfig
from megarl.flow import Rollout
from megarl.flow.events import ENGINE_CHANGED, HELD_OUT_FINISHED, EngineChange, FinishedGroups
from megarl.packing import Sample
from megarl.runtime.messages import Event
from megarl.trainer.early_scores import EarlyScores
from megarl.trainer.engine_set import EngineSet
from megarl.trainer.evaluation import evaluate_actors, run
from megarl.trainer.rank_events import RankEvents
from megarl.trainer.replay import DriverLog
from megarl.trainer.state import TrainState
from tests.trainer.test_actor_state import actor, config
from tests.trainer.test_early_scores import Call

NUM_SAMPLES = 2
ROWS = {row: "sums" for row in range(7)}


def reward(version: int, row: int, index: int, greedy: bool) -> float:
    """What a held-out answer is worth depends on the weights and on what it draws."""
    return random.Random(f"{version}/{row}/{index}/{greedy}").random()


class Engine:
    def __init__(self, rank: int) -> None:
        self.rank, self.version, self.is_pinned, self.has_left = rank, 0, False, False
        self.is_joining = False
        """Whether it was started again and waits for weights."""
        self.rows: list[int] = []
        self.greedy = False
        self.answers: dict[int, int] = {}
        """Sample id -> version of the weights that made it."""


class EngineCall(Call):
    executor: Engines

    def result(self) -> list[Any]:
        self.executor.wait_any([self])
        return self.values


class Engines:
    """One rank per engine, and what the driver may ask of it."""

    call_timeout_s, label, failure = 1e9, None, None

    def __init__(self, number: int, seed: int) -> None:
        self.random, self.engines = random.Random(seed), [Engine(rank) for rank in range(number)]
        self.ranks = {role: [*range(number)] for role in ("rollout", "reward", "data")}
        self.queues: list[deque[Call]] = [deque() for _ in range(number)]
        self.events: list[Event] = []

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Call:
        return self.call_on(self.ranks[role], role, method, *args, **kwargs)

    def call_on(self, ranks: Sequence[int], role: str, method: str, *args: Any, **kwargs: Any) -> Call:
        call = EngineCall(tuple(ranks), role, method, (args, kwargs))
        call.executor = self
        for rank in ranks:
            self.queues[rank].append(call)
        return call

    def take_events(self, name: str) -> list[Event]:
        taken = [event for event in self.events if event.name == name]
        self.events = [event for event in self.events if event.name != name]
        return taken

    def wait_any(self, futures: Sequence[Any], or_event: Any = False) -> list[Any]:
        for _ in range(10_000):
            if done := [future for future in futures if future.done()]:
                return done
            if or_event and self.events:
                return []
            self.go_on()
        raise AssertionError("deadlock: nothing the driver waits for comes")

    def go_on(self) -> None:
        """End a call, or let an engine take a step."""
        heads = {id(queue[0]): queue[0] for queue in self.queues if queue}
        ready = [c for c in heads.values() if all(self.queues[rank][0] is c for rank in c.ranks)]
        busy = [engine for engine in self.engines if engine.rows and not engine.has_left]
        if not (choices := [*ready, *busy]):
            return
        if isinstance(chosen := self.random.choice(choices), Engine):
            self.step(chosen)
            return
        for rank in chosen.ranks:
            self.queues[rank].popleft()
        args, kwargs = chosen.args
        chosen.values = [
            getattr(self, chosen.method)(self.engines[rank], *args, **kwargs) for rank in chosen.ranks
        ]

    def step(self, engine: Engine) -> None:
        row = engine.rows.pop(self.random.randrange(len(engine.rows)))
        samples = self.answer(engine, row)
        self.events.append(Event(engine.rank, HELD_OUT_FINISHED, FinishedGroups("rollout", samples)))

    def answer(self, engine: Engine, row: int) -> list[Sample]:
        n = 1 if engine.greedy else NUM_SAMPLES
        ids = [row * n + index for index in range(n)]
        engine.answers |= dict.fromkeys(ids, engine.version)
        return [Sample(id, 5, 3, (engine.rank,), group=row, version=engine.version) for id in ids]

    def lose(self, engine: Engine) -> None:
        engine.has_left, engine.is_pinned, engine.rows = True, False, []
        self.report_change(engine, False, "killed")

    def report_change(self, engine: Engine, is_live: bool, reason: str = "") -> None:
        change = EngineChange("rollout", engine.rank, is_live, reason)
        self.events.append(Event(engine.rank, ENGINE_CHANGED, change))

    # Methods of the roles, on one rank.

    def set_pinned(self, engine: Engine, is_pinned: bool) -> None:
        engine.is_pinned = is_pinned and not engine.has_left

    def sync(self, engine: Engine, version: int) -> dict[str, float]:
        if engine.is_joining:
            engine.is_joining = engine.has_left = False
            self.report_change(engine, True)
        if not engine.is_pinned and not engine.has_left:
            engine.version = version
        return {}

    def generate(
        self, engine: Engine, purpose: str, visits, greedy: bool, engines=None, wait: bool = True
    ) -> list[Sample]:
        assert purpose == "eval" and not engine.rows, "an evaluation begins while another one runs"
        engine.answers, engine.greedy = {}, greedy
        if engine.has_left:
            return []
        chosen = [row % len(self.engines) for row in visits] if engines is None else engines
        own = [row for row, of in zip(visits, chosen, strict=True) if of == engine.rank]
        if wait:
            return [sample for row in own for sample in self.answer(engine, row)]
        assert engine.is_pinned or not own
        engine.rows = own
        return []

    def score(self, engine: Engine, purpose: str, sample_ids, num_logged: int) -> list[dict]:
        n = 1 if engine.greedy else NUM_SAMPLES
        return [
            {"sample_id": id, "reward": reward(engine.answers[id], *divmod(id, n), engine.greedy)}
            for id in sample_ids
            if id in engine.answers
        ]

    def load_requests(self, engine: Engine, folder: str, visits, engines) -> None:
        pass


def open_job(folder, executor: Engines, eval_engines: int) -> RankEvents:
    job = config(folder)
    min_engines = eval_engines + 1 if len(executor.engines) > eval_engines else None
    job = replace(
        job,
        algorithm=REGISTRY["grpo"](),
        run=replace(job.run, save=str(folder / "run"), eval_num_samples=NUM_SAMPLES),
        streaming=StreamingConfig(staleness=1, eval_engines=eval_engines, min_engines=min_engines),
        placement=replace(job.placement, rollout_engine="out-of-process"),
    )
    state = object.__new__(TrainState)
    state.actors, state.completed, state.in_step = {"": actor(job)}, 0, False
    state.first.eval_rows = ROWS
    mesh = MeshSpec(tuple(range(len(executor.engines))))
    meshes = {"rollout": mesh, "reward": mesh}
    engines = EngineSet(executor, meshes, state)
    log = DriverLog(job, len(mesh.ranks), lambda text: None)
    log.start(state)
    engines.start(log)
    return RankEvents(executor, meshes, state, engines, EarlyScores(executor, meshes, state, {}, {}))


@functools.cache
def waited(version: int) -> dict[str, float]:
    """Scores of an evaluation that all of two engines take part in."""
    executor = Engines(2, 0)
    for engine in executor.engines:
        engine.version = version
    with tempfile.TemporaryDirectory() as folder:
        events = open_job(Path(folder), executor, 0)
        return run(evaluate_actors(events._state, events.answering))[0]


def sync(executor: Engines, events: RankEvents, version: int) -> None:
    events._state.completed = version
    Rollout(executor, "rollout").sync(version)
    events.pinned.synced("rollout")


SCHEDULES = given(
    seed=st.integers(0, 2**32),
    number=st.integers(2, 5),
    eval_engines=st.integers(1, 4),
    num_lost=st.integers(0, 2),
)


@SCHEDULES
@settings(max_examples=60, deadline=None)
def test_the_scores_are_those_of_a_run_that_waits(tmp_path_factory, seed, number, eval_engines, num_lost):
    check_schedule(tmp_path_factory.mktemp("job"), seed, number, eval_engines, num_lost)


@pytest.mark.nightly
@SCHEDULES
@settings(max_examples=3000, deadline=None)
def test_the_scores_are_those_of_a_run_that_waits_in_many_schedules(
    tmp_path_factory, seed, number, eval_engines, num_lost
):
    check_schedule(tmp_path_factory.mktemp("job"), seed, number, eval_engines, num_lost)


def check_schedule(folder: Path, seed: int, number: int, eval_engines: int, num_lost: int) -> None:
    """Five steps with an evaluation every other step, weights that arrive meanwhile, and engines that leave
    and come back."""
    eval_engines = min(eval_engines, number - 1)
    chance = random.Random(seed)
    executor = Engines(number, seed + 1)
    events = open_job(folder, executor, eval_engines)
    buffer, pinned = events._state.first.buffer, events.pinned
    found, notes, began = {}, [], []
    sync(executor, events, 0)
    for version in range(6):
        if version % 2 == 0:
            pinned.finish()

            def record(scores, answers, version=version) -> None:
                assert version not in found
                found[version] = scores

            if pinned.begin(version, record, notes.append):
                began.append(version)
                assert buffer.pinned_engines
        for _ in range(chance.randrange(40)):  # the step's work
            events.wait_any([Rollout(executor, "rollout").on([0]).set_pinned(executor.engines[0].is_pinned)])
            assert len(buffer.closed_engines) < number, "no engine is left to train with"
            events.take()
            executor.go_on()
        live = [engine for engine in executor.engines if not engine.has_left]
        if num_lost and len(live) > eval_engines + 1 and chance.random() < 0.5:
            num_lost -= 1
            executor.lose(chance.choice(live))
        for engine in executor.engines:
            engine.is_joining = engine.has_left and chance.random() < 0.5
        sync(executor, events, version + 1)
        closed = buffer.closed_engines
        assert len(buffer.pinned_engines) <= eval_engines, (
            "an engine that is released gets weights, and prompts"
        )
        while any(executor.queues):
            executor.go_on()
        for engine in executor.engines:  # an engine that gets prompts has the newest weights
            assert engine.rank in closed or engine.has_left or engine.version == version + 1
    pinned.finish()
    given_up = [version for version in began if version not in found]
    assert len(given_up) == len(notes) and (not given_up or num_lost < 2)
    for version, scores in found.items():
        assert scores == waited(version)
    sync(executor, events, 7)
    assert not buffer.pinned_engines


def test_one_engine_evaluates_while_training_waits(tmp_path):
    events = open_job(tmp_path, Engines(1, 0), 1)
    assert not events.pinned.begin(0, lambda *_: None, lambda text: None)
    assert not events._state.first.buffer.pinned_engines


def test_an_evaluation_without_engines_is_given_up(tmp_path):
    executor, notes = Engines(3, 0), []
    events = open_job(tmp_path, executor, 1)
    assert events.pinned.begin(4, lambda *_: pytest.fail("it has scores"), notes.append)
    assert events._state.first.buffer.pinned_engines == {2}
    executor.lose(executor.engines[2])
    events.pinned.finish()
    assert notes == ["the evaluation of step 4 is given up: the engines with its weights have left"]
    assert events._state.first.buffer.closed_engines == {2} and not executor.engines[0].is_pinned


@pytest.mark.parametrize("is_asked_again", [False, True])
def test_an_evaluating_engine_that_comes_back_takes_no_part(tmp_path, is_asked_again):
    """It has newer weights. It comes back before the others are asked for its rows, or while they answer them."""
    executor, found = Engines(4, 0), []
    events = open_job(tmp_path, executor, 2)
    sync(executor, events, 0)
    assert events.pinned.begin(0, lambda scores, answers: found.append(scores), pytest.fail)
    _, _, other, lost = executor.engines
    while not lost.rows:
        executor.go_on()
    executor.lose(lost)
    while is_asked_again and len(other.rows) < len(ROWS):
        executor.go_on()
        events.pinned.advance()
    lost.is_joining = True
    sync(executor, events, 1)
    while any(executor.queues):
        executor.go_on()
    assert lost.version == 1
    events.pinned.finish()
    assert found == [waited(0)]
