"""Four gloo ranks bring samples and columns from mesh to mesh, in many random rounds; each rank judges what
it got against values that it makes itself from the sample's number. Started by test_data_plane.py; ends with
code 0 if all was right.

    python tests/workers/run_data_plane.py FOLDER RANK ROUNDS"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from datetime import timedelta
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.batch import Batch
from megarl.config.mesh import MeshSpec, replicas, shard_keys
from megarl.flow.columns import COMPUTED_COLUMNS
from megarl.packing import Sample, preferred_ranks, plan_mini_batches
from megarl.invariants import InvariantError
from megarl.workers import data, exchange
from megarl.workers.data import DataRole
from megarl.workers.store import MissingSampleError, RolloutSample, RolloutBlock, SampleStore

WORLD_SIZE = 4
MESHES = {
    "actor": MeshSpec((0, 1, 2, 3), tp=2),
    "reference": MeshSpec((0, 1, 2, 3), tp=2),
    "critic": MeshSpec((0, 1, 2, 3)),
    "odd": MeshSpec((1, 2, 3)),
    "pipeline": MeshSpec((0, 1, 2, 3), pp=2),
    "alone": MeshSpec((3,)),
    "crossed": MeshSpec((3, 0, 2, 1), tp=2),
    "context": MeshSpec((0, 1, 2, 3), cp=2, pp=2),
}
KEYS = shard_keys(MESHES)
ENGINES = (((0,), (1,), (2,), (3,)), ((0, 1), (2, 3)), ((0, 1, 2, 3),), ((2,),), ((1, 3), (0,)))
"""Ranks of each engine, all of which hold what it samples."""


def random_samples(seed: int) -> list[Sample]:
    """Odd lengths, so that no column of a message is aligned by luck; sometimes fewer samples than ranks."""
    rng = random.Random(f"samples {seed}")
    engines, samples = rng.choice(ENGINES), []
    for i in rng.sample(range(1000), rng.choice([1, 2, rng.randint(3, 40)])):
        length = rng.randint(2, 60)
        sample = Sample(i, length, rng.randint(1, length - 1), rng.choice(engines))
        versions = versions_of(sample)
        runs = tuple((version, len([*tokens])) for version, tokens in groupby(versions))
        samples.append(replace(sample, version=versions[0], version_runs=runs if len(runs) > 1 else ()))
    return samples


def versions_of(sample: Sample) -> list[int]:
    """Versions of the weights that sampled the response tokens: some change several times."""
    rng = random.Random(f"versions {sample.sample_id}")
    return sorted(rng.choices(range(3, 3 + rng.randint(1, 4)), k=sample.response_length))


FORMATS = {"actor": {"routed_experts": (torch.int16, (3, 5))}}
"""What the engines report for one batch shard."""


def tokens_of(seed: int, sample: Sample) -> list[int]:
    rng = random.Random(f"tokens {seed} {sample.sample_id}")
    return [rng.randrange(2**40) for _ in range(sample.length)]


def column_of(seed: int, name: str, sample: Sample) -> torch.Tensor:
    """[length] fp32 of any bits: denormals, infinities and NaNs with a payload, which a conversion or a sum
    would change."""
    rng = random.Random(f"{name} {seed} {sample.sample_id}")
    return torch.tensor(
        [rng.randrange(-(2**31), 2**31) for _ in range(sample.length)], dtype=torch.int32
    ).view(torch.float32)


def experts_of(seed: int, sample: Sample) -> torch.Tensor:
    """[length, 3, 5] int16, with the highest and the lowest."""
    rng = random.Random(f"experts {seed} {sample.sample_id}")
    return torch.tensor(
        [rng.randrange(-(2**15), 2**15) for _ in range(sample.length * 15)], dtype=torch.int16
    ).view(-1, 3, 5)


def holes_of(sample: Sample) -> list[tuple[int, int]]:
    """Return where the response of some samples holds a token that was not sampled: after its first one."""
    num_context = sample.length - sample.response_length
    return [(1, 2)] if sample.sample_id % 2 and num_context > 1 and sample.response_length > 1 else []


def mask_of(sample: Sample) -> list[bool]:
    num_context, num_holes = sample.length - sample.response_length, len(holes_of(sample))
    rest = [True] * (sample.response_length - num_holes)
    return [False] * (num_context - num_holes) + [True, False] * num_holes + rest


def rolled_out(seed: int, samples: list[Sample], rank: int) -> RolloutBlock:
    """Return what the engine of this rank made of these samples. Its log-probs are plain numbers."""
    made = []
    for s in samples:
        if rank in s.owners:
            tokens, split = tokens_of(seed, s), mask_of(s).index(True)
            log_probs = [-s.sample_id - k / 64 for k in range(s.response_length)]
            of_engine = tokens[:split], tokens[split:], log_probs
            versions = [version for version, count in s.runs for _ in range(count)]
            experts = experts_of(seed, s)
            how = {"experts": experts, "holes": tuple(holes_of(s))}
            made.append(RolloutSample(s.sample_id, 0, s.group, versions, *of_engine, **how))
    return RolloutBlock(made)


def roll_out(role: DataRole, seed: int, samples: list[Sample], rank: int) -> None:
    """Let the samples take the place of all rollouts of this rank. Engines may deliver them in several blocks."""
    rollouts = role.store.source("train")
    rollouts.release()
    for block in samples[::2], samples[1::2]:
        rollouts.add(rolled_out(seed, block, rank))


def check_samples(seed: int, batch: Batch, samples: list[Sample]) -> None:
    """Everything that came from the engine, against the numbers it comes from."""
    assert batch.sample_ids.tolist() == [s.sample_id for s in samples]
    assert batch.cu_seqlens.tolist() == torch.tensor([0, *(s.length for s in samples)]).cumsum(0).tolist()
    assert batch.tokens.tolist() == [t for s in samples for t in tokens_of(seed, s)]
    assert batch.response_mask.tolist() == [is_sampled for s in samples for is_sampled in mask_of(s)]
    assert batch.rollout_log_probs[batch.response_mask].tolist() == [
        -s.sample_id - k / 64 for s in samples for k in range(s.response_length)
    ]
    assert not batch.rollout_log_probs[~batch.response_mask].any()
    versions = [version for s in samples for version, count in s.runs for _ in range(count)]
    assert batch.weight_versions[batch.response_mask].tolist() == versions
    assert not batch.weight_versions[~batch.response_mask].any()


def expected(seed: int, name: str, samples: list[Sample]) -> list[int]:
    """Bits of a whole column."""
    return [b for s in samples for b in column_of(seed, name, s).view(torch.int32).tolist()]


def has_batch(store: SampleStore, key: str) -> bool:
    try:
        return store.batch(key) is not None
    except MissingSampleError:
        return False


def one_round(seed: int, rank: int, role: DataRole) -> None:
    samples = random_samples(seed)
    by_id, rng, store = {s.sample_id: s for s in samples}, random.Random(f"round {seed}"), role.store
    roll_out(role, seed, samples, rank)
    size, max_tokens = rng.randint(1, len(samples)), rng.choice([20, 100, 10_000])
    for key in dict.fromkeys(KEYS.values()):
        mesh = MESHES[key]
        plan = plan_mini_batches(
            samples, size, preferred_ranks(samples, replicas(mesh)), mesh.dp, max_tokens, 64, str(seed)
        )
        role.distribute(key, samples, plan)
        assert has_batch(store, key) == (rank in mesh.ranks)
        if rank in mesh.ranks:
            ids = [i for m in plan for i in m.samples_of(mesh.coordinates(rank)["dp"])]
            batch, members = store.batch(key).batch, [by_id[i] for i in ids]
            check_samples(seed, batch, members)
            assert (batch.routed_experts is not None) == (key in FORMATS)
            if key in FORMATS:
                assert torch.equal(
                    batch.routed_experts,
                    torch.cat(
                        [torch.empty(0, 3, 5, dtype=torch.int16), *(experts_of(seed, s) for s in members)]
                    ),
                )

    written = rng.choice([key for key in store.layouts])
    columns = rng.sample(COMPUTED_COLUMNS, rng.randint(1, 3))
    write(seed, columns, written, by_id, rank, store)
    have = [written]
    for key in rng.sample(
        [s for s in store.layouts if s != written], 3
    ):  # also from a mesh that got the columns itself
        source, all_call = rng.choice(have), rng.random() < 0.5
        if all_call or rank in {
            r for s in (source, key) for block in replicas(MESHES[s], last_stage=True) for r in block
        }:
            role.exchange(columns, source, key)
        have.append(key)
        check_columns(seed, columns, key, by_id, rank, store)


def write(
    seed: int, columns: list[str], key: str, by_id: dict[int, Sample], rank: int, store: SampleStore
) -> None:
    if any(rank in block for block in replicas(MESHES[key], last_stage=True)):
        batch = store.batch(key).batch
        members = [by_id[i] for i in batch.sample_ids.tolist()]
        for name in columns:
            batch.set_column(name, torch.cat([torch.empty(0), *(column_of(seed, name, s) for s in members)]))


def check_columns(
    seed: int, columns: list[str], key: str, by_id: dict[int, Sample], rank: int, store: SampleStore
) -> None:
    if rank not in MESHES[key].ranks:
        return
    batch = store.batch(key).batch
    if any(rank in block for block in replicas(MESHES[key], last_stage=True)):
        members = [by_id[i] for i in batch.sample_ids.tolist()]
        assert all(
            getattr(batch, name).view(torch.int32).tolist() == expected(seed, name, members)
            for name in columns
        )
        check_samples(seed, batch, members)
    assert batch.columns.keys() <= {
        "rollout_log_probs",
        "weight_versions",
        *columns,
        *FORMATS.get(key, ()),
    }


def raises(text: str, call, *arguments, error: type[Exception] = ValueError) -> None:
    try:
        call(*arguments)
    except error as raised:
        assert text in str(raised), f"{text!r} is not in {raised}"
    else:
        raise AssertionError(f"no error with {text!r}")


def refused(rank: int, role: DataRole) -> None:
    """What all ranks can know is refused by all ranks, and nothing is under way afterwards: the rounds that
    follow would see it."""
    samples = [Sample(i, 7, 3, (i % 4,)) for i in range(8)]
    roll_out(role, -1, samples, rank)
    plans = {
        key: plan_mini_batches(samples, 8, {}, MESHES[key].dp, 100, 64, None) for key in ("actor", "critic")
    }
    orphan = [*samples[:5], Sample(5, 7, 3, ()), *samples[6:]]
    text = "sample 5 is wanted by batch shard 'actor' (tp 2, cp 1, dp 2, pp 1 on ranks 0 1 2 3), but no rank owns it"
    raises(text, role.distribute, "actor", orphan, plans["actor"])
    for key, plan in plans.items():
        role.distribute(key, samples, plan)
    raises("column values is not there yet", role.exchange, ["values"], "critic", "actor")


def swapped(rank: int, role: DataRole) -> None:
    """Rows of samples of equal length are swapped where they leave, and where they arrive: the ranks that get
    them say so."""
    samples = [Sample(i, 7, 3, (i % 4,)) for i in range(8)]
    roll_out(role, -2, samples, rank)
    plans = {
        key: plan_mini_batches(samples, 8, {}, MESHES[key].dp, 100, 64, None) for key in ("actor", "critic")
    }
    rows_of, move_rows = exchange._rows_of, data.move_rows

    def rotated(held, name, *arguments):
        rows = rows_of(held, name, *arguments)
        return (
            rows
            if name == "tokens"
            else dict(zip(rows, [*list(rows.values())[1:], *list(rows.values())[:1]]))
        )

    def rotated_on_arrival(*arguments, **keywords):
        moved = move_rows(*arguments, **keywords)
        return moved._replace(columns={name: column.roll(7) for name, column in moved.columns.items()})

    exchange._rows_of = rotated
    raises(
        "rollout_log_probs of sample", role.distribute, "actor", samples, plans["actor"], error=InvariantError
    )
    exchange._rows_of = rows_of
    for key, plan in plans.items():
        role.distribute(key, samples, plan)
    write(-2, ["values"], "critic", {s.sample_id: s for s in samples}, rank, role.store)
    exchange._rows_of = rotated
    raises("values of sample", role.exchange, ["values"], "critic", "actor", error=InvariantError)
    exchange._rows_of, data.move_rows = rows_of, rotated_on_arrival
    raises("values of sample", role.exchange, ["values"], "critic", "actor", error=InvariantError)
    data.move_rows = move_rows
    role.exchange(["values"], "critic", "actor")


def main() -> None:
    folder, rank, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=30),
    )
    send_and_receive, messages = dist.batch_isend_irecv, []

    def counted(operations):
        peers = [(op.op, op.peer) for op in operations]
        assert len(set(peers)) == len(peers) and rank not in {
            peer for _, peer in peers
        }  # one per pair; own rows are not sent
        messages.extend(peers)
        return send_and_receive(operations)

    dist.batch_isend_irecv = counted
    role = DataRole(
        SampleStore(),
        MESHES,
        KEYS,
        vocab_sizes=dict.fromkeys(MESHES, 2**40),
        formats=FORMATS,
        has_versions=True,
    )
    refused(rank, role)
    swapped(rank, role)
    for seed in range(rounds):
        one_round(seed, rank, role)
    assert len(messages) > 3 * rounds
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
