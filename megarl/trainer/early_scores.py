"""Let reward models score the samples of finished groups before a step trains on them.

    early.begin()                        finished groups go to reward models that have nothing to do
    early.complete(actor, groups)        a step has taken these groups: what is missing is scored next
    early.scores("reward_model", batch)  future of the scores of the step's samples

A reward model takes part if no role of another kind is on its ranks: others have work of their own meanwhile,
and would wait for the scores. Each group is a mini-batch of its own, so its scores depend on its samples only,
and not on what else is finished."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.config.mesh import MeshSpec
from megarl.flow import Data, Flow, RewardModel, Rollout
from megarl.flow.job_roles import Record
from megarl.futures import Future
from megarl.packing import plan_mini_batches
from megarl.role_names import kind_and_suffix
from megarl.runtime.executor import Executor
from megarl.trainer.groups import Group
from megarl.trainer.rollout_batch import RolloutBatch
from megarl.trainer.state import TrainState

Call = Future[list[Record]]


class ScoresFuture(Future[Any]):
    """The future of `RewardModel.score` in a step: done when the calls that score the step's samples have ended.

    Args:
        calls: calls that score these samples, and maybe others.
        num_logged: number of the batch's samples, the first ones, whose records keep the answer of a judge; -1
            is all."""

    def __init__(
        self, executor: Executor, role: str, calls: Iterable[Call], batch: RolloutBatch, num_logged: int
    ) -> None:
        self.role, self._executor, self._batch, self._num_logged = role, executor, batch, num_logged
        self._calls = [*{id(call): call for call in calls}.values()]
        self._start, self.ended = time.monotonic(), time.time()
        self.waited_s = 0.0
        """Seconds that the step waited for scores; 0 until done."""
        self._is_done = all(call.done() for call in self._calls)

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self.waited_s

    def done(self) -> bool:
        if not self._is_done and all(call.done() for call in self._calls):
            self._is_done, self.waited_s, self.ended = True, time.monotonic() - self._start, time.time()
        return self._is_done

    def result(self) -> list[list[Record]]:
        self._executor.wait_any([self])
        ids = [sample.sample_id for sample in self._batch.samples]
        found = {
            record["sample_id"]: record
            for call in self._calls
            for of_rank in call.result()
            for record in of_rank
        }
        unlogged = ids[self._num_logged :] if self._num_logged >= 0 else []
        for sample in unlogged:
            found.get(sample, {}).pop("answer", None)
        return [[found[sample] for sample in ids if sample in found]]


@dataclass
class _Shard:
    """The reward models that work on one batch shard."""

    key: str
    roles: list[str]
    begun: dict[int, dict[str, Call]] = field(default_factory=dict)
    """Visit of each group that was given to the models and not taken by a step -> role -> call."""
    taken: dict[int, dict[str, Call]] = field(default_factory=dict)
    """The same, of the groups of the current step."""
    newest: Mapping[str, Call] = field(default_factory=dict)
    """Calls for the groups that were given last."""


class EarlyScores:
    """Gives groups that are finished to reward models, and collects the scores for the step that takes them.

    Args:
        meshes: role -> its mesh.
        shard_key_of: role -> shard key.
        hidden_size: shard key -> hidden size of its first role, for the cost of a sequence."""

    def __init__(
        self,
        executor: Executor,
        meshes: Mapping[str, MeshSpec],
        state: TrainState,
        shard_key_of: Mapping[str, str],
        hidden_size: Mapping[str, int],
    ) -> None:
        self._executor, self._meshes, self._state, self._hidden_size = executor, meshes, state, hidden_size
        self._candidates: dict[str, list[str]] = {}  # shard key -> reward models
        if state.first.config.streaming.staleness:
            for role in models_with_own_ranks(meshes):
                self._candidates.setdefault(shard_key_of[role], []).append(role)
        self._shards: dict[str, _Shard] = {}  # of the flow of the last step

    def begin_step(self, flow: Flow) -> None:
        """Let those reward models take part that the step's flow asks for scores."""
        called = {(node.role, node.declaration()) for node in flow.nodes if not node.background}
        wanted = {
            key: roles
            for key, roles in self._candidates.items()
            if (f"rollout{self._state.actor_of(key).suffix}", Rollout.generate) in called
            and all((role, RewardModel.score) in called for role in roles)
        }
        self._shards = {key: self._shards.get(key) or _Shard(key, roles) for key, roles in wanted.items()}

    @property
    def roles(self) -> list[str]:
        """The reward models that take part in this step. The first of a batch shard names it."""
        return [role for shard in self._shards.values() for role in shard.roles]

    def begin(self) -> None:
        """Give the finished groups to the reward models that have ended their last call."""
        for shard in self._shards.values():
            if all(call.done() for call in shard.newest.values()):
                finished = self._state.actor_of(shard.key).buffer.finished
                self._give(shard, [group for group in finished if group.visit not in shard.begun])

    def complete(self, rollout: str, groups: Sequence[Group]) -> None:
        """Give those of the groups to the reward models that they do not have, for the step that took them."""
        for shard in self._shards.values():
            if self._state.actor_of(shard.key) is self._state.actor_of(rollout):
                self._give(shard, [group for group in groups if group.visit not in shard.begun])
                shard.taken = {group.visit: shard.begun.pop(group.visit) for group in groups}

    def scores(self, role: str, batch: RolloutBatch) -> ScoresFuture:
        """Return the future of a role's records of the step's samples."""
        shard = next(shard for shard in self._shards.values() if role in shard.roles)
        calls = [shard.taken[visit][role] for visit in batch.visits]
        num_logged = self._state.actor_of(role).config.run.num_rollouts_to_log
        return ScoresFuture(self._executor, role, calls, batch, num_logged)

    def _give(self, shard: _Shard, groups: Sequence[Group]) -> None:
        if not groups:
            return
        actor, mesh = self._state.actor_of(shard.key), self._meshes[shard.key]
        samples, mini_batches = [], []
        for group in groups:
            own = [group.samples[sample] for sample in sorted(group.samples)]
            samples += own
            mini_batches += plan_mini_batches(
                own,
                len(own),
                {},  # where a sample is must not decide with which others it is scored
                mesh.dp,
                actor.config.batch.max_tokens_per_micro_batch,
                self._hidden_size[shard.key],
                seed=None,
            )
        ranks = sorted({*mesh.ranks, *(rank for sample in samples for rank in sample.owners)})
        Data(self._executor, "data", ranks).distribute(
            shard.key, samples, mini_batches, f"train{actor.suffix}"
        )
        row_of = {sample.sample_id: group.row for group in groups for sample in group.samples.values()}
        shard.newest = {role: RewardModel(self._executor, role).score_groups(row_of) for role in shard.roles}
        shard.begun |= dict.fromkeys((group.visit for group in groups), dict(shard.newest))


def models_with_own_ranks(meshes: Mapping[str, MeshSpec]) -> list[str]:
    """Return the reward models on whose ranks no role of another kind is."""
    models = [role for role in meshes if kind_and_suffix(role)[0] == "reward_model"]
    taken = {rank for role, mesh in meshes.items() if role not in models for rank in mesh.ranks}
    return [role for role in models if not taken & {*meshes[role].ranks}]
