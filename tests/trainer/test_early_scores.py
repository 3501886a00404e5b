"""Reward models score groups while other ranks work: whatever is finished when, a score is that of the group.

    pytest tests/trainer/test_early_scores.py

Ranks are simulated: they take the driver's calls in order, each at a random time, and hold the last batch that they
were given."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms import REGISTRY
from megarl.config.mesh import MeshSpec
from megarl.config.schema import StreamingConfig
from megarl.flow import symbolic_roles
from megarl.futures import Future
from megarl.packing import MiniBatch, Sample
from megarl.trainer.early_scores import EarlyScores, models_with_own_ranks
from megarl.trainer.rollout_batch import RolloutBatch
from megarl.trainer.state import TrainState
from tests.trainer.test_actor_state import actor, config

MESHES = {
    "actor": MeshSpec((0,)),
    "rollout": MeshSpec((1, 2)),
    "reward": MeshSpec((1, 2)),
    "reward_model": MeshSpec((3, 4)),
    "reward_model_2": MeshSpec((3, 4)),
}
KEYS = {role: "reward_model" if role.startswith("reward_model") else "actor" for role in MESHES}


@dataclass(eq=False)
class Call(Future[Any]):
    ranks: tuple[int, ...]
    role: str
    method: str
    args: tuple[Any, ...]
    values: list[Any] | None = None

    def done(self) -> bool:
        return self.values is not None

    def result(self) -> list[Any]:
        assert self.values is not None, "the driver waits for a call that has not ended"
        return self.values


class Ranks:
    """Ranks that end the calls at their head in a random order."""

    def __init__(self, seed: int) -> None:
        self.ranks = {role: [*mesh.ranks] for role, mesh in MESHES.items()} | {"data": [*range(5)]}
        self.random, self.queues = random.Random(seed), {rank: deque() for rank in range(5)}
        self.batch: tuple[list[MiniBatch], set[int]] = ([], set())
        self.called: list[tuple[int, ...]] = []
        self.most_waiting = 0

    def call(self, role: str, method: str, *args: Any) -> Call:
        return self.call_on(self.ranks[role], role, method, *args)

    def call_on(self, ranks: Sequence[int], role: str, method: str, *args: Any) -> Call:
        call = Call(tuple(ranks), role, method, args)
        for rank in ranks:
            self.queues[rank].append(call)
        self.called.append(call.ranks)
        self.most_waiting = max(self.most_waiting, sum(c.method == "score_groups" for c in self.queues[3]))
        return call

    def wait_any(self, futures: Sequence[Future[Any]]) -> list[Future[Any]]:
        while not any(future.done() for future in futures):
            assert self.end_one(), "deadlock: nothing runs"
        return [future for future in futures if future.done()]

    def end_one(self) -> bool:
        heads = {id(queue[0]): queue[0] for queue in self.queues.values() if queue}
        ready = [c for c in heads.values() if all(self.queues[rank][0] is c for rank in c.ranks)]
        if not ready:
            return False
        call = self.random.choice(ready)
        for rank in call.ranks:
            self.queues[rank].popleft()
        call.values = self.run(call)
        return True

    def run(self, call: Call) -> list[Any]:
        if call.method == "distribute":
            key, samples, mini_batches, source = call.args
            assert (key, source) == ("reward_model", "train")
            owners = {rank for sample in samples for rank in sample.owners}
            assert {*call.ranks} == owners | {3, 4}, "ranks that have nothing to do with it are called"
            self.batch = mini_batches, {sample.sample_id for sample in samples}
            return [{} for _ in call.ranks]
        assert call.method == "score_groups" and self.batch[1] == call.args[0].keys()
        return [
            [
                {"sample_id": sample, "score": score(call.role, sample, mini_batch), "answer": "text"}
                for mini_batch in self.batch[0]
                for sample in mini_batch.samples_of(dp_rank)
            ]
            for dp_rank in (0, 1)
        ]


def score(role: str, sample: int, mini_batch: MiniBatch) -> float:
    """What a model says depends on which samples it scores together, and where. Its whole part is the sample."""
    return sample + hash((role, sample, mini_batch.micro_batches)) % 997 / 1000


def state_of(folder, staleness: int, num_prompts: int) -> TrainState:
    job = config(folder)
    job = replace(
        job,
        algorithm=REGISTRY["grpo"](),
        batch=replace(job.batch, num_prompts=num_prompts),
        run=replace(job.run, num_rollouts_to_log=1),
        streaming=StreamingConfig(staleness=staleness),
        placement=replace(job.placement, rollout_engine="out-of-process"),
    )
    state = object.__new__(TrainState)
    state.actors = {"": actor(job)}
    return state


def flow():
    roles = symbolic_roles("actor reward_model reward_model_2", present=MESHES)
    return roles[0].rollout().join(*(role.score for role in roles[1:])).update(roles[0], reads=("tokens",))


def run(folder, seed: int, staleness: int, num_prompts: int) -> Mapping[str, dict[int, float]]:
    """Scores by role and sample of five steps whose groups finish, and whose ranks work, as the seed says."""
    state, ranks, chance = state_of(folder, staleness, num_prompts), Ranks(seed), random.Random(seed + 1)
    early = EarlyScores(ranks, MESHES, state, KEYS, {"actor": 8, "reward_model": 8})
    buffer, found = state.first.buffer, {"reward_model": {}, "reward_model_2": {}}
    unfinished: list[int] = []
    for step in range(1, 6):
        early.begin_step(flow())
        assert early.roles == ["reward_model", "reward_model_2"]
        state.first.admit_next(buffer.num_to_admit(step - 1, 5), step)
        unfinished += buffer.issue([1] * len(buffer.waiting()))
        while not buffer.is_ready(step) or chance.random() < 0.3:
            if unfinished and chance.random() < 0.5:
                visit = unfinished.pop(chance.randrange(len(unfinished)))
                buffer.add(
                    Sample(2 * visit + i, 5 + visit % 3, 3, (1 + visit % 2,), group=visit) for i in range(2)
                )
            early.begin()
            ranks.end_one()
        assert ranks.most_waiting <= 2, "a call of each model, and no more until it has ended"
        groups = buffer.take(step)
        early.complete("rollout", groups)
        ranks.most_waiting = 0
        batch = RolloutBatch(step, {})
        batch.take(groups)
        for role in found:
            scored = early.scores(role, batch)
            (records,) = scored.result()
            assert [record["sample_id"] for record in records] == [s.sample_id for s in batch.samples]
            assert ["answer" in record for record in records] == [True] + [False] * (len(records) - 1)
            assert all(int(record["score"]) == record["sample_id"] for record in records)
            assert not found[role].keys() & {record["sample_id"] for record in records}
            found[role] |= {record["sample_id"]: record["score"] for record in records}
    assert not unfinished and not len(buffer)
    return found


@given(seeds=st.tuples(st.integers(0, 2**32), st.integers(0, 2**32)), staleness=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_the_scores_do_not_depend_on_what_is_finished_when(tmp_path_factory, seeds, staleness):
    folder = tmp_path_factory.mktemp("job")
    first, second = (run(folder, seed, staleness, num_prompts=3) for seed in seeds)
    assert first == second and len(first["reward_model"]) == 30


@pytest.mark.parametrize(("ranks", "is_early"), [((3, 4), True), ((1, 2), False), ((0, 3), False)])
def test_models_that_share_no_rank_with_others_score_early(ranks, is_early):
    models = dict.fromkeys(("reward_model", "reward_model_2"), MeshSpec(ranks))
    assert models_with_own_ranks(MESHES | models) == [*models] * is_early


def test_a_flow_that_does_not_ask_for_scores_has_none(tmp_path):
    early = EarlyScores(Ranks(0), MESHES, state_of(tmp_path, 1, 2), KEYS, {"reward_model": 8})
    (role,) = symbolic_roles("actor", present=MESHES)
    early.begin_step(role.rollout().update(role, reads=("tokens",)))
    assert early.roles == []
