"""Micro-batch plans: nothing lost, nothing twice, equal counts on all ranks, balanced, and the same
mini-batches in every layout; and the messages that follow from two plans: every sample once to every rank
that needs it.

    pytest tests/test_packing.py"""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from megarl.config.mesh import MeshSpec, replicas
from megarl.packing import (
    MiniBatch,
    Sample,
    preferred_ranks,
    plan_mini_batches,
    plan_route,
    ranks_of_samples,
    sequence_cost,
)


def make_samples(seed: int, count: int) -> list[Sample]:
    rng = random.Random(seed)
    lengths = [rng.choice([rng.randint(2, 40), rng.randint(2, 400)]) for _ in range(count)]
    return [Sample(i, n, rng.randint(1, n - 1), owners=(i % 2,)) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("max_tokens", [64, 500, 10**6])
def test_every_sample_once_within_the_token_budget(dp_size, max_tokens):
    samples = make_samples(dp_size, 48)
    length = {s.sample_id: s.length for s in samples}
    plans = plan_mini_batches(samples, 16, {}, dp_size, max_tokens, 64, "seed")
    assert [p.num_sequences for p in plans] == [16, 16, 16]
    assert sorted(i for p in plans for rank in range(dp_size) for i in p.samples_of(rank)) == list(range(48))
    assert sum(p.num_tokens for p in plans) == sum(s.response_length for s in samples)
    for plan in plans:
        assert (
            len({len(micro_batches) for micro_batches in plan.micro_batches}) == 1
        )  # or a collective would wait for ever
        for micro_batches in plan.micro_batches:
            for micro in micro_batches:
                assert sum(length[i] for i in micro) <= max_tokens or len(micro) == 1


def test_mini_batches_do_not_depend_on_layout_or_homes():
    samples = make_samples(1, 40)

    def members(dp_size, preferred, max_tokens):
        plans = plan_mini_batches(samples, 10, preferred, dp_size, max_tokens, 64, "3/7")
        return [sorted(i for rank in range(dp_size) for i in p.samples_of(rank)) for p in plans]

    assert (
        members(1, {}, 100)
        == members(2, {s.sample_id: s.sample_id % 2 for s in samples}, 10**6)
        == members(5, {}, 64)
    )
    other = plan_mini_batches(samples, 10, {}, 1, 100, 64, "3/8")
    assert members(1, {}, 100) != [sorted(p.samples_of(0)) for p in other]


def test_cost_is_balanced_and_samples_stay_home_where_that_is_fair():
    samples = make_samples(2, 200)
    preferred = {s.sample_id: s.sample_id % 4 for s in samples}
    (plan,) = plan_mini_batches(samples, 200, preferred, 4, 10**6, 64, None)
    cost = {s.sample_id: sequence_cost(s.length, 64) for s in samples}
    loads = [sum(cost[i] for i in plan.samples_of(rank)) for rank in range(4)]
    # Greedy with the longest first: the spread is at most one sample, and the last ones placed are short.
    assert max(loads) / min(loads) < 1.02
    stayed = sum(preferred[i] == rank for rank in range(4) for i in plan.samples_of(rank))
    assert stayed > 150


def random_mesh(rng: random.Random, world: range) -> MeshSpec:
    splits = (
        (1, 1, 1),
        (1, 1, 1),
        (2, 1, 1),
        (1, 2, 1),
        (1, 1, 2),
        (2, 2, 1),
        (2, 1, 2),
        (1, 2, 2),
        (3, 1, 1),
    )
    tp, cp, pp = rng.choice([sizes for sizes in splits if math.prod(sizes) <= len(world)])
    dp = rng.randint(1, len(world) // (tp * cp * pp))
    return MeshSpec(tuple(rng.sample(world, dp * tp * cp * pp)), tp=tp, cp=cp, pp=pp)


def check_plan(
    samples: list[Sample],
    plans: list[MiniBatch],
    global_batch_size: int,
    dp_size: int,
    max_tokens: int,
    hidden_size: int,
):
    by_id = {s.sample_id: s for s in samples}
    assert Counter(i for plan in plans for rank in range(dp_size) for i in plan.samples_of(rank)) == Counter(
        list(by_id)
    )
    for number, plan in enumerate(plans):
        members = [[by_id[i] for i in plan.samples_of(rank)] for rank in range(dp_size)]
        assert (
            plan.num_sequences
            == sum(map(len, members))
            == min(global_batch_size, len(samples) - number * global_batch_size)
        )
        assert plan.num_tokens == sum(s.response_length for share in members for s in share)
        assert len(plan.micro_batches) == dp_size and len({len(micros) for micros in plan.micro_batches}) == 1
        for share, micros in zip(members, plan.micro_batches, strict=True):
            assert all(
                len(micro) <= 1 or sum(by_id[i].length for i in micro) <= max_tokens for micro in micros
            )
            # empty only where no other could be split
            assert all(micros) or all(len(micro) <= 1 for micro in micros)
        costs = [sum(sequence_cost(s.length, hidden_size) for s in share) for share in members]
        longest = max(sequence_cost(s.length, hidden_size) for share in members for s in share)
        assert dp_size * max(costs) <= sum(costs) + (dp_size - 1) * longest  # whole numbers: no rounding


def check_routes(world: range, owners: dict[int, tuple[int, ...]], destinations: dict[int, tuple[int, ...]]):
    routes = [plan_route(rank, owners, destinations) for rank in world]
    sent = {(source, to): ids for source, route in enumerate(routes) for to, ids in route.outgoing.items()}
    got = {(source, to): ids for to, route in enumerate(routes) for source, ids in route.incoming.items()}
    assert sent == got  # samples in the same order at both ends
    arrivals = Counter((i, to) for (_, to), ids in sent.items() for i in ids)
    assert arrivals == Counter(
        (i, to) for i, ranks in destinations.items() for to in ranks if to not in owners[i]
    )
    assert all(source in owners[i] for (source, _), ids in sent.items() for i in ids)
    for held_by in set(owners.values()):
        loads = [
            sum(owners[i] == held_by for ids in routes[rank].outgoing.values() for i in ids)
            for rank in held_by
        ]
        assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize(
    "seeds",
    [
        range(2000),
        *(pytest.param(range(s, s + 2000), marks=pytest.mark.nightly) for s in range(2000, 10_000, 2000)),
    ],
    ids=lambda seeds: f"from-{seeds.start}",
)
def test_ten_thousand_random_steps_on_two_meshes(seeds):
    for seed in seeds:
        rng = random.Random(seed)
        world = range(rng.randint(1, 8))
        first, second = random_mesh(rng, world), random_mesh(rng, world)
        engine = rng.choice([1, 1, 2])
        blocks = [tuple(world[i : i + engine]) for i in range(0, len(world), engine)]
        longest = rng.choice([3, 30, 8192])
        samples = []
        for i in rng.sample(range(1000), rng.choice([0, 1, rng.randint(2, 10), rng.randint(2, 40)])):
            length = rng.choice([rng.randint(2, longest), 2, longest])
            samples.append(Sample(i, length, rng.randint(1, length - 1), rng.choice(blocks)))
        size, max_tokens, hidden_size = (
            rng.randint(1, 45),
            rng.choice([1, longest, 2 * longest, 10**6]),
            rng.choice([1, 64, 8192]),
        )
        layouts, members = [], []
        for mesh in (first, second):
            preferred = preferred_ranks(samples, replicas(mesh)) if rng.random() < 0.7 else {}
            plans = plan_mini_batches(samples, size, preferred, mesh.dp, max_tokens, hidden_size, str(seed))
            check_plan(samples, plans, size, mesh.dp, max_tokens, hidden_size)
            layouts.append(plans)
            members.append(
                [sorted(i for rank in range(mesh.dp) for i in plan.samples_of(rank)) for plan in plans]
            )
        assert members[0] == members[1]
        check_routes(
            world, {s.sample_id: s.owners for s in samples}, ranks_of_samples(layouts[0], replicas(first))
        )
        check_routes(
            world,
            *(
                ranks_of_samples(plans, replicas(mesh, last_stage=True))
                for plans, mesh in zip(layouts, (first, second), strict=True)
            ),
        )


def test_a_plan_does_not_depend_on_the_order_in_which_equal_loads_were_met():
    samples = make_samples(3, 60)
    wanted = plan_mini_batches(samples, 60, {}, 3, 500, 64, None)
    for seed in range(5):
        shuffled = random.Random(seed).sample(samples, 60)
        assert plan_mini_batches(shuffled, 60, {}, 3, 500, 64, None) == wanted


def test_replicas_that_share_an_engine_take_turns_as_homes():
    samples = [Sample(i, 5, 2, owners=(0, 1)) for i in range(4)] + [Sample(9, 5, 2, owners=(3,))]
    assert preferred_ranks(samples, ((0,), (1,), (2,))) == {0: 0, 1: 1, 2: 0, 3: 1}
    assert preferred_ranks(samples, ((0, 1), (2, 3))) == {0: 0, 1: 0, 2: 0, 3: 0, 9: 1}


def test_bad_input_is_named():
    plans = plan_mini_batches([Sample(4, 5, 2)], 2, {}, 2, 10, 64, None)
    with pytest.raises(ValueError, match="planned for 2 data-parallel ranks, the mesh has 1"):
        ranks_of_samples(plans, ((0,),))
    with pytest.raises(ValueError, match="sample 4 comes twice"):
        ranks_of_samples(plans * 2, ((0,), (1,)))
