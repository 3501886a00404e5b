"""The sample store holds samples by id until they are released, and names a sample that it does not hold.

pytest tests/workers/test_store.py"""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import replace

import pytest
import torch

from megarl.batch import Batch
from megarl.config.mesh import MeshSpec, shard_keys
from megarl.invariants import InvariantError, digest
from megarl.packing import Sample, plan_mini_batches
from megarl.workers.data import DataRole
from megarl.workers.store import MissingSampleError, RolloutSample, RolloutBlock, SampleStore


def rollout(sample_id: int, group: int = 0, version: int = 0) -> RolloutSample:
    prompt, response = [5, 6], [7] * (1 + sample_id % 3)
    log_probs = [-0.5 - sample_id] * len(response)
    bound = digest(prompt, response)
    versions = [version] * len(response)
    return RolloutSample(sample_id, 2, group, versions, prompt, response, log_probs, digest=bound)


def make_store(*blocks: tuple[int, ...]) -> SampleStore:
    store = SampleStore()
    for ids in blocks:
        store.source("train").add(RolloutBlock(map(rollout, ids)))
    return store


def make_role(*blocks: tuple[int, ...]) -> DataRole:
    """Return the data role of a job of one rank."""
    meshes = {"actor": MeshSpec((0,)), "actor_2": MeshSpec((0,))}
    return DataRole(make_store(*blocks), meshes, shard_keys(meshes), dict.fromkeys(meshes, 10))


def distribute(role: DataRole, samples: list[Sample], key: str = "actor", source: str = "train") -> None:
    role.distribute(key, samples, plan_mini_batches(samples, 8, {}, 1, 100, 64, None), source)


def records(*ids: int) -> list[Sample]:
    return [rollout(i).record((0,)) for i in ids]


def test_samples_are_read_by_id_whatever_block_they_came_in():
    store = make_store((4, 9), (1,), (7, 2))
    assert [r.sample_id for r in store.rollouts("train")] == [4, 9, 1, 7, 2]
    assert [r.sample_id for r in store.rollouts("train", [2, 4])] == [2, 4]
    assert [block.sample_ids for block in store.source("train").blocks([9, 2, 4])] == [[4, 9], [7, 2]]
    assert store.rollouts("eval") == []


def test_the_record_says_what_the_driver_has_to_know():
    (made,) = make_store((8,)).rollouts("train")
    made.group, made.versions = 17, [3, 3, 3]
    made.truncated = True
    record = made.record((0, 1))
    assert record == Sample(
        8, 5, 3, (0, 1), truncated=True, digest=digest([5, 6], [7, 7, 7]), group=17, version=3
    )
    assert record.tokens_of(3) == 3 and record.tokens_of(2) == 0
    made.versions, made.truncated = [3, 4, 4], False
    record = made.record((0, 1))
    assert (record.version, record.version_runs) == (3, ((3, 1), (4, 2)))
    assert [record.tokens_of(version) for version in (2, 3, 4)] == [0, 1, 2]
    made.versions = [3, 4]
    with pytest.raises(InvariantError, match="sample 8 has 3 response tokens, and 2 versions of weights"):
        made.record((0, 1))


def test_a_block_is_packed_once_however_many_batches_read_it(monkeypatch):
    role, packed = make_role((4, 9, 1)), []
    from_samples = Batch.from_samples
    monkeypatch.setattr(
        Batch, "from_samples", lambda *arguments: packed.append(arguments[0]) or from_samples(*arguments)
    )
    for key in ("actor", "actor_2", "actor"):
        distribute(role, records(1, 4), key)
    assert packed == [[4, 9, 1]]


def test_a_batch_takes_its_samples_from_any_blocks_in_its_own_order():
    role = make_role((4, 9), (1,), (7, 2))
    distribute(role, records(2, 9, 1))
    batch = role.store.batch("actor").batch
    assert sorted(batch.sample_ids.tolist()) == [1, 2, 9]
    for row, sample in enumerate(batch.sample_ids.tolist()):
        one = batch.select([row])
        assert one.tokens.tolist() == [5, 6, *rollout(sample).response]
        assert one.rollout_log_probs[2:].tolist() == rollout(sample).log_probs


@pytest.mark.parametrize("ids, missing", [([5], 5), ([4, 6], 6)])
def test_a_sample_that_was_never_here_is_named(ids, missing):
    table = make_store((4, 9)).source("train")
    words = f"sample {missing} is not among the rollouts 'train' of this rank: it was released, or never here"
    for read in (table.blocks, table.release):
        with pytest.raises(MissingSampleError, match=words):
            read(ids)
    assert list(table) == [4, 9]  # a release that fails forgets none


def test_a_released_sample_is_named_and_the_others_stay():
    role = make_role((4, 9), (1,))
    role.store.source("train").release([9])
    with pytest.raises(MissingSampleError, match="sample 9 is not among the rollouts 'train'"):
        role.store.rollouts("train", [4, 9])
    with pytest.raises(ValueError, match=r"samples for batch shard 'actor' .*: sample 9 is not among the"):
        distribute(role, records(1, 9))
    distribute(role, records(1, 4))
    assert len(role.store.batch("actor").batch) == 2


def test_a_sample_that_is_here_cannot_come_again_before_it_is_released():
    table = make_store((4, 9)).source("train")
    with pytest.raises(InvariantError, match="sample 9 is already among the rollouts 'train' of this rank"):
        table.add(RolloutBlock([rollout(3), rollout(9)]))
    assert list(table) == [4, 9]
    table.release([9])
    table.add(RolloutBlock([rollout(3), rollout(9)]))
    assert list(table) == [4, 3, 9]


def test_the_memory_of_a_block_is_free_when_its_last_sample_is_released():
    role = make_role((4, 9), (1,))
    distribute(role, records(1, 4, 9))
    objects = [
        *role.store.source("train").blocks([4, 1]),
        *role.store.mesh("actor").blocks([9]),
    ]
    references = [weakref.ref(item) for item in objects]
    del objects

    def alive() -> list[bool]:
        gc.collect()
        return [reference() is not None for reference in references]

    role.release([9, 1])
    assert alive() == [True, False, True]
    role.release([4])
    assert alive() == [False, False, False]


def test_a_batch_with_a_released_sample_is_not_trained_on():
    role = make_role((4, 9, 1))
    distribute(role, records(4, 9, 1))
    distribute(role, records(4, 9), "actor_2", "train")
    role.release([1])
    assert len(role.store.batch("actor_2").batch) == 2
    with pytest.raises(MissingSampleError, match="sample 1 is not among the samples of batch shard 'actor'"):
        role.store.batch("actor")
    role.release([4, 9])
    with pytest.raises(
        MissingSampleError, match="no batch shard 'actor_2' on this rank: none was distributed"
    ):
        role.store.batch("actor_2")


def test_samples_of_another_source_with_the_same_ids_are_not_released():
    role = make_role((4, 9))
    role.store.source("train_2").add(RolloutBlock(map(rollout, (4, 9))))
    distribute(role, records(4, 9))
    distribute(role, records(4, 9), "actor_2", "train_2")
    role.release([4], "train_2")
    assert list(role.store.source("train")) == [4, 9] and list(role.store.source("train_2")) == [9]
    assert len(role.store.batch("actor").batch) == 2


def test_the_next_batch_of_a_mesh_takes_the_place_of_the_last():
    role = make_role((4, 9), (1,))
    distribute(role, records(4, 9))
    role.store.batch("actor").set_column("values", torch.zeros(7))
    distribute(role, records(9, 1))
    assert sorted(role.store.mesh("actor")) == [1, 9]
    assert role.store.batch("actor").batch.values is None


def test_a_rank_without_samples_keeps_its_empty_batch():
    role = make_role((4,))
    distribute(role, [])
    role.release([4])
    assert len(role.store.batch("actor").batch) == 0


@pytest.mark.parametrize("change", [{"group": 3}, {"version": 1}, {"version_runs": ((0, 1),)}, {"digest": 5}])
def test_a_record_that_the_driver_has_wrong_is_refused(change):
    role, (name, wrong) = make_role((4, 9)), *change.items()
    samples = [records(4)[0], replace(records(9)[0], **change)]
    with pytest.raises(
        InvariantError,
        match=f"{name} of sample 9 is .* where it was sampled, and {re.escape(str(wrong))} in",
    ):
        distribute(role, samples)
