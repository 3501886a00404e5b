"""The training loop on rollouts that come late, out of order and in groups of unequal sizes: each sample is
trained on once, in a run that never stops and in one that goes on from a snapshot.

    pytest tests/trainer/test_late_rollouts.py

Trainer, flow, scheduler, plans, rewards and recording are the real ones; the roles are stand-ins without a model."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.hf_config import ModelShape
from megarl.flow import FlowError, symbolic_roles
from megarl.flow.events import GROUPS_FINISHED, FinishedGroups
from megarl.invariants import InvariantError
from megarl.loggers.console import Progress
from megarl.packing import MiniBatch, Sample
from megarl.runtime.hosting import WorkerContext
from megarl.runtime.inline_executor import InlineExecutor
from megarl.trainer.executors import interfaces_of
from megarl.trainer.gate import GateError
from megarl.trainer.own_ranks import Started
from megarl.trainer.preflight import Inputs
from megarl.trainer.trainer import Trainer
from tests.trainer.test_actor_state import config

LARGEST_GROUP = 5


def group_size(visit: int) -> int:
    return 1 + 2 * visit % LARGEST_GROUP


class LateRollout:
    """An engine that finishes one group per step, between the calls. The groups of visits 1 and 3 come two
    training steps late.

    A call that waits returns four groups, the newest first."""

    role, method = "rollout", "generate"

    def __init__(self, context: WorkerContext) -> None:
        self.pending: list[int] = []
        self.num_delivered, self.version, self.num_skipped = 4, 0, 0
        self.context, context.idle_hook = context, self

    def setup(self) -> None:
        pass

    def sync(self, version: int) -> dict[str, float]:
        self.version = version
        return {}

    def shut_down(self) -> None:
        pass

    def generate(
        self,
        purpose: str,
        visits: dict[int, int],
        greedy: bool = False,
        engines: list[int] | None = None,
        wait: bool = True,
    ) -> list[Sample]:
        self.pending = sorted([*self.pending, *visits], key=lambda visit: visit + 8 * (visit in (1, 3)))
        if not wait:
            assert engines == [0] * len(visits)
            return []
        groups, self.pending = self.pending[: self.num_delivered], self.pending[self.num_delivered :]
        return [sample for visit in groups[::-1] for sample in self.samples(visit)]

    def sample_canaries(self, count: int) -> list[Sample]:
        return [
            Sample(-1 - index, 9, 2, group=-1 - index, version=self.version, trained=False)
            for index in range(count - self.num_skipped)
        ]

    def samples(self, visit: int) -> list[Sample]:
        return [
            Sample(LARGEST_GROUP * visit + index, 5 + index, 3, group=visit, version=self.version)
            for index in range(group_size(visit))
        ]

    # The idle hook.

    def agree(self, value: bool) -> bool:
        return value or not self.pending

    def step(self) -> bool:
        finished = FinishedGroups("rollout", self.samples(self.pending.pop(0)))
        self.context.emit(GROUPS_FINISHED, finished)
        return True


class Data:
    """Notes what the mini-batches of every step hold."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.released: list[int] = []
        self.canaries: list[list[int]] = []

    def distribute(
        self, shard: str, samples: list[Sample], mini_batches: list[MiniBatch], rollouts: str = "train"
    ) -> dict[str, float]:
        notes = self.canaries if rollouts == "canary" else self.steps
        notes.append([sample for mini_batch in mini_batches for sample in mini_batch.samples_of(0)])
        return {}

    def release(self, sample_ids: list[int], source: str) -> None:
        self.released += sample_ids


class Rewards:
    def setup(self) -> None:
        pass

    def shut_down(self) -> None:
        pass

    def score(self, purpose: str, sample_ids: list[int], num_logged: int | None = None) -> list[dict]:
        return [{"sample_id": sample, "reward": 1.0} for sample in sample_ids]


class Actor:
    def __init__(self) -> None:
        self.groups: list[Counter] = []
        self.versions: list[int] = []
        """Version of each `log_probs` with canaries."""
        self.gap = 0.0

    def setup(self) -> None:
        pass

    def log_probs(self, version: int | None = None, canaries: bool = False) -> dict[str, float]:
        """Trainer and engine agree exactly."""
        self.versions += [version] * canaries
        zero = ("mean_abs", "clipped_abs", "max_abs", "outliers", "kl")
        return {f"mismatch/{name}": 0.0 for name in zero} | {
            "mismatch/log_prob_abs": 1.0,
            "mismatch/tokens": 10,
        }

    def canary_tokens(self) -> list[dict[str, float]]:
        gap = self.gap if len(self.versions) > 1 else 0.0
        return [
            {"sample_id": -1 - index, "position": at, "token": 3, "trainer": -1.0, "engine": -1.0 - gap}
            for index in range(4)
            for at in (7, 8)
        ]

    def advantages(self, sample_ids, group_ids, rewards, kl_coef, digests=None) -> dict[str, float]:
        self.groups.append(Counter(group_ids))
        return {}

    def update(self, kl_coef: float = 0.0) -> dict[str, float]:
        return {"policy/loss": 0.0}


def open_trainer(folder: Path, save: str, staleness: int = 2) -> tuple[Trainer, Data, Actor]:
    job = config(folder)
    job = replace(
        job,
        algorithm=REGISTRY["grpo"](),
        batch=replace(job.batch, train_iters=6, num_prompts=4, global_batch_size=8),
        run=replace(job.run, save=str(folder / save), exit_loss=0.5),  # of fine-tuning alone
        streaming=replace(job.streaming, staleness=staleness, num_canaries=0),
    )
    data, actor = Data(), Actor()
    executor = InlineExecutor(
        lambda context: {
            "actor": actor,
            "rollout": LateRollout(context),
            "reward": Rewards(),
            "data": data,
        },
        interfaces_of(("actor", "rollout", "reward", "data")),
    )
    inputs = {"": Inputs(ModelShape.load(job.model.model), range(10), None)}
    progress = Progress(6, io.StringIO(), terminal=False)
    trainer = Trainer(job, started=Started(executor, inputs, 1, progress))
    buffer = trainer.state.first.buffer
    admit = buffer.admit
    buffer.admit = lambda visits, _, version: admit(visits, {v: group_size(v) for v in visits}, version)
    return trainer, data, actor


def train(trainer: Trainer, num_steps: int) -> None:
    steps = trainer.steps()
    for _ in range(num_steps):
        next(steps)
        trainer.update(trainer.rollout())


def check(data: list[Data], actors: list[Actor], num_admitted: int, waiting: set[int]) -> None:
    trained = Counter(sample for one in data for step in one.steps for sample in step)
    expected = {
        LARGEST_GROUP * visit + index
        for visit in set(range(num_admitted)) - waiting
        for index in range(group_size(visit))
    }
    assert trained.keys() == expected and {*trained.values()} == {1}
    for groups in (groups for actor in actors for groups in actor.groups):
        assert all(size == group_size(visit) for visit, size in groups.items())  # whole groups only


def waiting_in(trainer: Trainer) -> set[int]:
    return {group["visit"] for group in trainer.state.first.buffer.snapshot()}


def test_each_sample_is_trained_on_once(tmp_path):
    with open_trainer(tmp_path, "run")[0] as trainer:
        train(trainer, 6)
        data, actor = (trainer.executor.roles[name] for name in ("data", "actor"))
        assert waiting_in(trainer) == set()  # admission ends with the last step
        check([data], [actor], num_admitted=24, waiting=set())
        assert [len(groups) for groups in actor.groups] == [4] * 6
        assert actor.groups[0].keys() == {0, 2, 4, 5}  # the others are late
        last = {sample for sample in data.released if sample in {*data.steps[-1]}}
        assert not last and sorted(data.released) == sorted(sum(data.steps[:-1], []))


def test_canaries_of_every_step_are_scored_and_not_trained_on(tmp_path):
    with open_trainer(tmp_path, "run")[0] as trainer:
        train(trainer, 6)
        data, actor = (trainer.executor.roles[name] for name in ("data", "actor"))
        assert [sorted(canaries) for canaries in data.canaries] == [[-4, -3, -2, -1]] * 6
        assert actor.versions == [0, 1, 2, 3, 4, 5]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["canary/tokens"], row["canary/max_abs"]) for row in rows] == [(8.0, 0.0)] * 6
    with open_trainer(tmp_path, "synchronous", staleness=0)[0] as trainer:
        train(trainer, 1)
        assert not trainer.executor.roles["data"].canaries and not trainer.executor.roles["actor"].versions


def test_a_canary_that_differs_or_is_missing_ends_the_job(tmp_path):
    trainer, _, actor = open_trainer(tmp_path, "differs")
    actor.gap = 1e-2
    with pytest.raises(GateError, match="engine 0 of rollout, weights of version 1, canaries: trainer"):
        train(trainer, 2)
    trainer.__exit__(RuntimeError, RuntimeError(), None)
    trainer = open_trainer(tmp_path, "missing")[0]
    trainer.executor.roles["rollout"].num_skipped = 1
    with pytest.raises(
        InvariantError, match="engine 0 of rollout has delivered 3 of 4 canaries of version 0"
    ):
        train(trainer, 1)
    trainer.__exit__(RuntimeError, RuntimeError(), None)


def test_a_run_that_goes_on_from_a_snapshot_trains_on_what_was_waiting(tmp_path):
    with open_trainer(tmp_path, "before")[0] as trainer:
        train(trainer, 1)
        first = [trainer.executor.roles[name] for name in ("data", "actor")]
        snapshot, waiting = json.loads(json.dumps(trainer.state.snapshot())), waiting_in(trainer)
        train(trainer, 1)  # what happens after the snapshot is lost
        del first[0].steps[1:], first[1].groups[1:]
    assert waiting == {1, 3, *range(6, 12)}
    with open_trainer(tmp_path, "after")[0] as trainer:
        trainer.state.restore(snapshot)
        trainer.executor.roles["rollout"].version = 1  # a job restores before its first sync
        assert trainer.step == 1 and waiting_in(trainer) == waiting
        train(trainer, 5)
        second = [trainer.executor.roles[name] for name in ("data", "actor")]
        check(
            [first[0], second[0]],
            [first[1], second[1]],
            num_admitted=24,
            waiting=waiting_in(trainer),
        )


def test_a_loop_may_leave_steps_out(tmp_path):
    with open_trainer(tmp_path, "run", staleness=0)[0] as trainer:
        seen = []
        for step in trainer.steps():
            seen.append(step)
            assert len(seen) <= 6, seen
            if step % 2:
                trainer.update(trainer.rollout())
        assert seen == [1, 2, 3, 4, 5, 6] and trainer.step == 6


def test_stale_training_refuses_what_would_lose_samples_and_goes_on(tmp_path):
    with open_trainer(tmp_path, "run", staleness=1)[0] as trainer:
        steps = trainer.steps()
        next(steps)
        with pytest.raises(ValueError, match=r"rows: with --staleness 1 .* Call trainer.admit\(rows\)"):
            trainer.rollout(rows=[3, 4, 5, 6])
        trainer.admit([7, 2])
        batch = trainer.rollout()
        waiting = {group.visit: group.row for group in trainer.state.first.buffer.groups}
        assert (batch.visits[0], waiting[1]) == (7, 2)  # before the next rows; visit 1 is late
        with pytest.raises(
            ValueError, match="called before in step 1: with --staleness 1 the step has taken"
        ):
            trainer.rollout()
        with pytest.raises(FlowError, match=r"staleness \(3\) must be the job's --staleness \(1\)"):
            trainer.rollout(symbolic_roles("actor")[0].rollout(staleness=3))
        trainer.update(batch)
        next(steps)
        with pytest.raises(ValueError, match="step 2 has ended without an update"):
            next(steps)


def test_synchronous_training_refuses_a_late_group(tmp_path):
    trainer = open_trainer(tmp_path, "run", staleness=0)[0]
    trainer.executor.roles["rollout"].num_delivered = 1
    with pytest.raises(RuntimeError, match="samples of visit 1 are missing: groups must be complete"):
        train(trainer, 1)
    trainer.__exit__(RuntimeError, RuntimeError(), None)
