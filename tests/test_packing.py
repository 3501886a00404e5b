"""Micro-batch plans: nothing lost, nothing twice, equal counts on all ranks, balanced, and the same mini-batches in every layout."""

from __future__ import annotations

import random

import pytest

from megarl.packing import Sample, plan_exchange, plan_mini_batches, sequence_cost


def make_samples(seed: int, count: int) -> list[Sample]:
    rng = random.Random(seed)
    lengths = [rng.choice([rng.randint(2, 40), rng.randint(2, 400)]) for _ in range(count)]
    return [Sample(i, n, rng.randint(1, n - 1), holders=(i % 2,)) for i, n in enumerate(lengths)]


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
        assert len({len(micro_batches) for micro_batches in plan.micro_batches}) == 1  # or a collective would wait for ever
        for micro_batches in plan.micro_batches:
            for micro in micro_batches:
                assert sum(length[i] for i in micro) <= max_tokens or len(micro) == 1


def test_mini_batches_do_not_depend_on_layout_or_homes():
    samples = make_samples(1, 40)

    def members(dp_size, homes, max_tokens):
        plans = plan_mini_batches(samples, 10, homes, dp_size, max_tokens, 64, "3/7")
        return [sorted(i for rank in range(dp_size) for i in p.samples_of(rank)) for p in plans]

    assert members(1, {}, 100) == members(2, {s.sample_id: s.sample_id % 2 for s in samples}, 10**6) == members(5, {}, 64)
    other = plan_mini_batches(samples, 10, {}, 1, 100, 64, "3/8")
    assert members(1, {}, 100) != [sorted(p.samples_of(0)) for p in other]


def test_cost_is_balanced_and_samples_stay_home_where_that_is_fair():
    samples = make_samples(2, 200)
    homes = {s.sample_id: s.sample_id % 4 for s in samples}
    (plan,) = plan_mini_batches(samples, 200, homes, 4, 10**6, 64, None)
    cost = {s.sample_id: sequence_cost(s.length, 64) for s in samples}
    loads = [sum(cost[i] for i in plan.samples_of(rank)) for rank in range(4)]
    # Greedy with the longest first: the spread is at most one sample, and the last ones placed are short.
    assert max(loads) / min(loads) < 1.02
    stayed = sum(homes[i] == rank for rank in range(4) for i in plan.samples_of(rank))
    assert stayed > 150


def test_exchange_moves_exactly_what_is_missing_and_spreads_the_senders():
    samples = [Sample(i, 5, 2, holders=(0, 1)) for i in range(6)]
    destinations = {0: (0,), 1: (2, 3), 2: (1, 2), 3: (3,), 4: (0, 1), 5: (2,)}
    moves = plan_exchange(samples, destinations)
    assert {(m.sample_id, m.destination) for m in moves} == {(1, 2), (1, 3), (2, 2), (3, 3), (5, 2)}
    assert all(m.source in (0, 1) for m in moves)
    assert {m.source for m in moves} == {0, 1}
