"""Simulated engines and a simulated training loop around the real sample buffer: ids, lengths and versions only.

A `Scenario` says how a run is shaped, and its seed decides everything random: lengths, the speed of engines,
when an engine is lost or joins, when it keeps its weights for an evaluation and how long, when a step is dropped,
and when the run stops and goes on from a checkpoint.
The version counts up in every step, also while a critic warms up and the weights of the engines stay.
`SimulatedRun(scenario).run()` trains to the end and raises AssertionError where a promise is broken."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

from megarl.packing import Sample
from megarl.trainer.buffer import SampleBuffer
from megarl.trainer.groups import Group

SAMPLES_PER_VISIT = 10
"""Sample ids of a visit begin at visit * SAMPLES_PER_VISIT."""


@dataclass(frozen=True)
class Scenario:
    num_prompts: int = 2
    staleness: int = 1
    in_order: bool = False
    train_iters: int = 6
    group_size: int = 2
    """Largest number of samples of a group."""
    num_engines: int = 2
    pins: float = 0.0
    """Probability that an evaluation pins an engine in a step, and that it releases it in another."""
    max_num_seqs: int = 4
    """Number of samples that an engine runs at a time."""
    has_long_tail: bool = True
    max_tokens: int | None = None
    """Limit on the tokens of a sample in a step, which does not bind groups that are due."""
    accidents: float = 0.1
    """Probability of each kind of accident: in a step, or a tenth of it in an engine's step."""
    seed: int = 0


@dataclass
class Request:
    """A sample that an engine is asked for."""

    sample_id: int
    visit: int
    length: int
    versions: list[int] = field(default_factory=list)
    """Version of each token that is sampled so far."""


class SimulatedRun:
    """One run of a scenario; see the module."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.random = scenario, random.Random(scenario.seed)
        self.buffer = self._new_buffer()
        self.engines: dict[int, list[Request]] = {i: [] for i in range(scenario.num_engines)}
        self.num_engines = scenario.num_engines
        self.pinned: dict[int, int] = {}
        """Engine that keeps its weights -> their version."""
        self.released: set[int] = set()
        """Engines that get weights at the end of the step."""
        self.num_pins = 0
        self.partial: dict[int, Request] = {}
        """Unfinished samples that no engine has, with the tokens that are not lost, by sample id."""
        self.version, self.num_admitted = 0, 0
        self.admitted_at: dict[int, int] = {}
        self.trained: list[list[int]] = []
        """Visits of each training step."""
        self.made: dict[int, Sample] = {}
        """Finished samples that no step has trained on, which the engines' ranks hold."""
        self.num_stops = self.num_drops = self.num_lost = 0

    def run(self) -> SimulatedRun:
        while self.version < self.scenario.train_iters:
            self.train_step(self.version + 1)
        assert len(self.buffer) == 0 and not any(self.engines.values())
        self.check_nothing_is_lost()
        return self

    def train_step(self, step: int) -> None:
        """Admit, wait, take, train and commit. A dropped step leaves everything but the engines' progress as
        it was."""
        self.admit()
        self.wait_until_ready(step)
        if self.happens():
            self.stop_and_resume()
            self.wait_until_ready(step)
        before = self.buffer.snapshot()
        groups = self.buffer.take(step)
        self.check_groups(groups, step)
        for _ in range(self.random.randrange(4)):  # engines go on while the step trains
            self.tick(set())
        if self.happens():
            self.num_drops += 1
            self.stop_and_resume(before)
            return
        self.trained.append([group.visit for group in groups])
        for sample in (sample for group in groups for sample in group.samples):
            del self.made[sample]
        self.version = step
        self.commit()
        self.check_nothing_is_lost()

    def commit(self) -> None:
        """Give new weights to the engines that are not pinned, pin some, and release others."""
        for engine in self.released:
            self.pinned.pop(engine, None)
            self.buffer.pinned_engines.discard(engine)
        self.released = {one for one in self.pinned if self.random.random() < self.scenario.pins}
        free = [engine for engine in self.engines if engine not in self.pinned]
        if self.scenario.pins and len(free) > 1 and self.random.random() < self.scenario.pins:
            self.pin(self.random.choice(free))

    def pin(self, engine: int) -> None:
        self.num_pins += 1
        self.pinned[engine] = self.version
        self.buffer.pinned_engines.add(engine)

    def admit(self) -> None:
        one = self.scenario
        count = self.buffer.num_to_admit(self.version, one.train_iters)
        expected = min(self.version + one.staleness + 1, one.train_iters) * one.num_prompts
        assert count == expected - self.num_admitted
        visits = {self.num_admitted + i: self.random.randrange(100) for i in range(count)}
        sizes = {visit: self.random.randint(1, one.group_size) for visit in visits}
        self.buffer.admit(visits, sizes, self.version)
        self.admitted_at |= dict.fromkeys(visits, self.version)
        self.num_admitted += count
        self.issue()

    def issue(self) -> None:
        """Give the waiting groups to engines: those of their samples that are not finished."""
        waiting = self.buffer.waiting()
        engines = self.buffer.engines(self.num_engines)
        assert {*engines} <= self.engines.keys(), "a prompt goes to an engine that is gone"
        assert not {*engines} & self.pinned.keys(), "a prompt goes to an engine with older weights"
        visits = self.buffer.issue(engines)
        assert [*visits] == [group.visit for group in waiting]
        reported = []
        for group in waiting:
            assert group.engine is not None
            for index in range(group.num_samples):
                sample = group.visit * SAMPLES_PER_VISIT + index
                if sample in self.made:
                    reported += [self.made[sample]] * (sample not in group.samples)
                else:
                    kept = self.partial.pop(sample, None)
                    self.engines[group.engine].append(kept or Request(sample, group.visit, self.length()))
        self.buffer.add(reported)

    def length(self) -> int:
        length = self.random.randint(1, 4)
        return 8 * length if self.scenario.has_long_tail and self.random.random() < 0.1 else length

    def wait_until_ready(self, step: int) -> None:
        num_ticks = 0
        while not self.buffer.is_ready(step):
            due = {group.visit for group in self.buffer.due(step)}
            assert due, f"step {step} waits, and every group that it may wait for is finished"
            if self.random.random() < self.scenario.accidents / 10:
                self.lose_engine()
            self.tick(due)
            num_ticks += 1
            assert num_ticks < 5000, f"deadlock: step {step} waits for {due}"

    def tick(self, due: set[int]) -> None:
        """Let a random half of the engines, at least one, make a step."""
        busy = [engine for engine, requests in self.engines.items() if requests]
        for engine in self.random.sample(busy, (len(busy) + 1) // 2):
            self.step_engine(engine, due)

    def step_engine(self, engine: int, due: set[int]) -> None:
        limit, requests, finished = self.scenario.max_tokens, self.engines[engine], []
        version = self.pinned.get(engine, self.version)
        running = [
            request
            for request in requests
            if limit is None or request.visit in due or request.versions.count(version) < limit
        ]
        for request in running[: self.scenario.max_num_seqs]:
            request.versions.append(version)
            if len(request.versions) == request.length:
                requests.remove(request)
                n, first = request.length, request.versions[0]
                finished.append(
                    Sample(request.sample_id, n + 3, n, (engine,), group=request.visit, version=first)
                )
        self.made |= {sample.sample_id: sample for sample in finished}
        self.random.shuffle(finished)
        self.buffer.add(finished)

    def happens(self) -> bool:
        return self.random.random() < self.scenario.accidents

    def lose_engine(self) -> None:
        """Lose an engine, whose samples keep the tokens that it has reported. One that was lost before, or
        this one if none is left, may join."""
        self.num_lost += 1
        free = [engine for engine in self.engines if engine not in self.pinned]
        # --min-engines is above --eval-engines: the last engine that trains stays
        lost = self.random.choice([*self.engines] if len(free) > 1 or not self.pinned else [*self.pinned])
        self.pinned.pop(lost, None)
        requests = self.engines.pop(lost)
        self.keep_tokens(requests)
        groups = {group.visit for group in self.buffer.lose_engine(lost)}
        assert groups == {request.visit for request in requests}
        if not self.engines or self.random.random() < 0.5:
            joining = self.random.choice(sorted(self.buffer.lost_engines))
            self.buffer.lost_engines.remove(joining)
            self.engines[joining] = []
        self.issue()

    def keep_tokens(self, requests: list[Request]) -> None:
        for request in requests:
            del request.versions[self.random.randint(0, len(request.versions)) :]
            self.partial[request.sample_id] = request

    def stop_and_resume(self, snapshot: list[dict] | None = None) -> None:
        """Go on from a checkpoint with another number of engines, which report again what is finished.

        Args:
            snapshot: of the buffer before a step that is dropped; None: of the buffer as it is."""
        self.num_stops += 1
        if snapshot is None:
            self.check_nothing_is_lost()
        saved = json.loads(json.dumps(snapshot or self.buffer.snapshot()))
        self.buffer = self._new_buffer()
        self.buffer.restore(saved)
        assert self.buffer.snapshot() == saved
        self.check_nothing_is_lost()
        for requests in self.engines.values():
            self.keep_tokens(requests)
        self.pinned, self.released = {}, set()
        self.num_engines = self.random.randint(1, 4)
        self.engines = {engine: [] for engine in range(self.num_engines)}
        self.issue()
        assert not self.partial

    def check_groups(self, groups: list[Group], step: int) -> None:
        """Whole groups, in number and order as promised, and no token older than the staleness."""
        one, visits = self.scenario, [group.visit for group in groups]
        assert len(groups) == one.num_prompts and visits == sorted(visits)
        if one.in_order or one.staleness == 0:
            assert visits == [*range((step - 1) * one.num_prompts, step * one.num_prompts)]
        for group in groups:
            assert group.version == self.admitted_at[group.visit]
            assert sorted(group.samples) == [
                group.visit * SAMPLES_PER_VISIT + index for index in range(group.num_samples)
            ]
            for sample in group.samples.values():
                assert group.version <= sample.version <= step - 1
                assert step - 1 - sample.version <= one.staleness, "a token is too old"

    def check_nothing_is_lost(self) -> None:
        """Every admitted prompt was trained on once or is in the buffer."""
        trained = [visit for step in self.trained for visit in step]
        waiting = [group.visit for group in self.buffer.groups]
        assert sorted(trained + waiting) == [*range(self.num_admitted)]

    def _new_buffer(self) -> SampleBuffer:
        return SampleBuffer(self.scenario.num_prompts, self.scenario.staleness, self.scenario.in_order)
