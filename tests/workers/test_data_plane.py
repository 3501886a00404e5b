"""Batch shards on meshes with different layouts: samples and columns arrive bit for bit, on every rank
that needs them, whatever meshes they go between (four gloo processes, run_data_plane.py); and what cannot be
moved is refused before anything is sent.

    pytest tests/workers/test_data_plane.py"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.config.mesh import MeshSpec, replicas, shard_keys
from megarl.invariants import InvariantError
from megarl.packing import Route, Sample, plan_mini_batches
from megarl.workers.data import DataRole
from megarl.workers.exchange import move_rows
from megarl.workers.store import BatchLayout, RolloutBlock, RolloutSample, SampleStore
from tests.launch import run_ranks
from tests.workers.run_data_plane import WORLD_SIZE

MESH = MeshSpec((0,))


def run_rounds(folder: Path, rounds: int, timeout: float = 120) -> None:
    script = Path(__file__).with_name("run_data_plane.py")
    run_ranks(WORLD_SIZE, lambda rank: [script, folder, rank, rounds], timeout=timeout)


def test_columns_written_on_one_mesh_arrive_on_every_other_bit_for_bit(tmp_path):
    run_rounds(tmp_path, rounds=60)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_in_many_more_rounds(tmp_path):
    run_rounds(tmp_path, rounds=1500, timeout=900)


def test_roles_with_one_mesh_have_one_batch_shard():
    wide, block = MeshSpec((0, 1, 2, 3)), MeshSpec((0, 1, 2, 3), tp=2)
    meshes = {
        "actor": block,
        "reference": block,
        "critic": wide,
        "rollout": wide,
        "reward_model": MeshSpec((0, 1, 2, 3), tp=2, ep=2),
        "reward_model_2": MeshSpec((1, 0, 2, 3)),
        "reward_model_3": MeshSpec((0, 1, 2, 3), cp=2),
    }
    assert shard_keys(meshes) == {
        "actor": "actor",
        "reference": "actor",
        "critic": "critic",
        "rollout": "critic",
        "reward_model": "actor",
        "reward_model_2": "reward_model_2",
        "reward_model_3": "reward_model_3",
    }


@pytest.mark.parametrize(
    "mesh",
    [
        MESH,
        MeshSpec((4, 2, 9, 0, 1, 3, 7, 8), tp=2, pp=2),
        MeshSpec((1, 2, 3)),
        MeshSpec((5, 6), pp=2),
        MeshSpec(tuple(range(9, 1, -1)), tp=2, cp=2),
        MeshSpec((3, 1, 4, 5), cp=2, pp=2),
    ],
)
def test_replicas_are_the_blocks_of_the_mesh(mesh):
    assert replicas(mesh) == tuple(mesh.ranks_where(dp=i) for i in range(mesh.dp))
    assert replicas(mesh, last_stage=True) == tuple(
        mesh.ranks_where(dp=i, pp=mesh.pp - 1) for i in range(mesh.dp)
    )


@pytest.fixture
def role(monkeypatch) -> DataRole:
    """Of a single process, in a job of two ranks as far as plans go. A message would be an error."""
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: pytest.fail("something was sent"))
    meshes = {"actor": MESH, "critic": MeshSpec((0, 1)), "odd": MeshSpec((1, 0))}
    role = DataRole(
        SampleStore(), meshes, shard_keys(meshes), vocab_sizes=dict.fromkeys(meshes, 100), has_versions=True
    )
    made = [
        RolloutSample(0, 0, 7, [2, 3], [5], [1, 2], [-0.5, -1.0]),
        RolloutSample(1, 0, 7, [2], [6, 7], [3], [-2.0]),
    ]
    role.store.source("train").add(RolloutBlock(made))
    return role


SAMPLES = [
    Sample(0, 3, 2, (0,), group=7, version=2, version_runs=((2, 1), (3, 1))),
    Sample(1, 3, 1, (0,), group=7, version=2),
]
UNKNOWN = Sample(2, 4, 2, (0,))
"""Rank 0 should have it, and does not."""


def plan(samples: list[Sample], dp_size: int = 1, preferred: dict[int, int] | None = None):
    return plan_mini_batches(samples, 8, preferred or {}, dp_size, 100, 64, None)


def test_a_job_of_one_rank_sends_nothing(role):
    role.distribute("actor", SAMPLES, plan(SAMPLES))
    assert role.store.batch("actor").batch.tokens.tolist() == [5, 1, 2, 6, 7, 3]
    assert role.exchange(["values"], "actor", "actor") == {}


@pytest.mark.parametrize(
    "text, key, samples, planned, dp_size",
    [
        (
            r"sample 1 is wanted by batch shard 'actor' \(tp 1, cp 1, dp 1, pp 1 on ranks 0\), but no rank owns it",
            "actor",
            [SAMPLES[0], replace(SAMPLES[1], owners=())],
            SAMPLES,
            1,
        ),
        (
            r"sample 1 is wanted by batch shard 'actor' .*, but it is not among the samples of the step",
            "actor",
            SAMPLES[:1],
            SAMPLES,
            1,
        ),
        (
            r"samples for batch shard 'actor' .*: sample 2 is not among the rollouts 'train' of this rank",
            "actor",
            [*SAMPLES, UNKNOWN],
            [UNKNOWN],
            1,
        ),
        (
            r"samples for batch shard 'actor' .*: sample 1 has 3 tokens on this rank, but 4 in the plan",
            "actor",
            [SAMPLES[0], replace(SAMPLES[1], length=4)],
            SAMPLES,
            1,
        ),
        (
            r"samples for batch shard 'critic' .*: sample 2 is not among the rollouts",
            "critic",
            [*SAMPLES, UNKNOWN],
            [UNKNOWN, SAMPLES[0]],
            2,
        ),
        (
            r"batch shard 'critic' .*: mini-batches are planned for 1 data-parallel ranks, the mesh has 2",
            "critic",
            SAMPLES,
            SAMPLES,
            1,
        ),
        (r"batch shard \('critik'\) must be one of actor, critic, odd", "critik", SAMPLES, SAMPLES, 1),
    ],
)
def test_samples_that_cannot_be_moved_are_refused_before_anything_is_sent(
    role, text, key, samples, planned, dp_size
):
    with pytest.raises(ValueError, match=text):
        role.distribute(key, samples, plan(planned, dp_size))


def test_columns_that_cannot_be_moved_are_refused_before_anything_is_sent(role, monkeypatch):
    def refuses(text, *arguments):
        with pytest.raises(ValueError, match=text):
            role.exchange(*arguments)

    role.distribute("actor", SAMPLES, plan(SAMPLES))
    refuses(
        r"batch shard 'odd' \(tp 1, cp 1, dp 2, pp 1 on ranks 1 0\) was not distributed yet",
        ["values"],
        "actor",
        "odd",
    )
    with monkeypatch.context() as patch:  # the other rank's sample leaves
        patch.setattr(dist, "P2POp", lambda *arguments: arguments)
        patch.setattr(dist, "batch_isend_irecv", lambda operations: [])
        role.distribute("odd", SAMPLES, plan(SAMPLES, 2, {0: 0, 1: 1}))
    refuses(r"column \('valeus'\) must be one of .* values", ["valeus"], "actor", "odd")
    refuses(
        r"values from batch shard 'actor' .* to batch shard 'odd' .*: column values is not there yet",
        ["values"],
        "actor",
        "odd",
    )
    role.store.batch("actor").batch.values = torch.zeros(5)
    refuses(
        r"column values is \[5\] torch.float32, but must be torch.float32 for 6 tokens",
        ["values"],
        "actor",
        "odd",
    )
    role.store.batch("actor").batch.set_column("values", torch.zeros(6))
    layout, longer = role.store.layouts["odd"], {0: SAMPLES[0], 1: replace(SAMPLES[1], length=4)}
    role.store.layouts["odd"] = replace(layout, samples=longer)
    refuses("were distributed for different samples", ["values"], "actor", "odd")
    role.store.layouts["odd"] = BatchLayout("train", plan([*SAMPLES, Sample(4, 2, 1)], 2), layout.samples)
    refuses(
        r"sample 4 is wanted by batch shard 'odd' .*, but is not in batch shard 'actor'",
        ["values"],
        "actor",
        "odd",
    )


@pytest.mark.parametrize(
    "words, change",
    [
        (
            "values of sample 1 are not those written for it",
            lambda batch: setattr(batch, "values", batch.values.roll(1)),
        ),
        ("returns of sample 1", lambda batch: setattr(batch, "returns", batch.returns.roll(3))),
        ("rollout_log_probs of sample 0", lambda batch: batch.rollout_log_probs[2].add_(1e-6)),
        ("weight_versions of sample 0", lambda batch: batch.weight_versions[2].sub_(1)),
        ("tokens of sample 1", lambda batch: batch.tokens[5].add_(1)),
        ("tokens of sample 1", lambda batch: setattr(batch, "response_mask", batch.response_mask.roll(-1))),
        ("tokens of sample 1", lambda batch: setattr(batch, "sample_ids", batch.sample_ids.flip(0))),
    ],
)
def test_a_column_that_changed_since_it_was_written_makes_no_micro_batch(role, words, change):
    role.distribute("actor", SAMPLES, plan(SAMPLES))
    shard = role.store.batch("actor")
    for name in ("values", "returns"):
        shard.set_column(name, torch.tensor([0.0, 1.0, 2.0, 0.0, 0.0, 3.0]))
    micro = shard.micro_batch([1, 0])
    assert micro.column("values").tolist() == [3.0, 1.0, 2.0]
    change(shard.batch)
    with pytest.raises(InvariantError, match=words):
        shard.micro_batch([1, 0])


def test_every_response_token_has_the_version_that_sampled_it(role):
    role.distribute("actor", SAMPLES, plan(SAMPLES))
    batch = role.store.batch("actor").batch
    assert batch.weight_versions.tolist() == [0, 2, 3, 0, 0, 2] and batch.weight_versions.dtype == torch.int32
    assert batch.select([1]).weight_versions.tolist() == [0, 0, 2]
    role.distribute("actor", [], plan([]))
    assert role.store.batch("actor").batch.weight_versions.tolist() == []
    role.has_versions = False  # --staleness 0
    role.distribute("actor", SAMPLES, plan(SAMPLES))
    assert "weight_versions" not in role.store.batch("actor").batch.columns


def test_columns_of_other_tokens_are_refused(role):
    role.distribute("actor", SAMPLES, plan(SAMPLES))
    shard = role.store.batch("actor")
    values = torch.arange(6.0)
    shard.set_column("values", values)
    digests = shard.digests_for(["values"])
    shard.take_columns({"values": values}, digests)
    with pytest.raises(
        InvariantError, match="tokens of sample 0 are not those that the columns were made of"
    ):
        shard.take_columns({"values": values}, digests | {"tokens": {0: 1, 1: digests["tokens"][1]}})


def test_a_rank_with_nothing_takes_part_without_columns():
    out = move_rows([], ["values", "returns"], Route(), [], {}).columns
    assert {name: column.numel() for name, column in out.items()} == {"values": 0, "returns": 0}
