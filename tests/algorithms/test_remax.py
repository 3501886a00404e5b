"""ReMax's advantages against the paper's formula (arXiv:2310.10505, algorithm 1) in float64, and what is left
out.

    pytest tests/algorithms/test_remax.py

Bound: rewards are fp32 numbers, so a difference of two is exact but for one rounding of 6e-8 of it."""

import math
import random

import pytest
import torch

from megarl.algorithms import REGISTRY, AdvantageInputs
from megarl.algorithms.base import ReferenceInputs

ReMax = REGISTRY["remax"]


def make_step(seed):
    """Rewards, group and "is greedy" of the samples of a step in random order; some rewards failed."""
    rng = random.Random(seed)
    samples = []
    for group in rng.sample(range(10**9), rng.randint(1, 5)):
        for index in range(rng.randint(1, 4) + 1):
            reward = math.nan if rng.random() < 0.15 else float(torch.tensor(rng.uniform(-2, 2)))
            samples.append((group, reward, index == 0))
    rng.shuffle(samples)
    return samples


def inputs_of(samples, rows):
    lengths = torch.arange(1, len(samples) + 1)
    return AdvantageInputs(
        rewards=torch.tensor([reward for _, reward, _ in samples]),
        group_ids=torch.tensor([group for group, _, _ in samples]),
        rows=torch.tensor(rows, dtype=torch.int64),
        response_lengths=lengths[rows],
        kl_coef=0.0,
        sum_over_ranks=lambda values: values,
        sample_lengths=lengths,
        is_untrained=torch.tensor([greedy for _, _, greedy in samples]),
    )


def formula(samples, row):
    """r(y) - r(greedy); None where one of the two is not there."""
    group, reward, _ = samples[row]
    (greedy,) = [r for g, r, is_greedy in samples if g == group and is_greedy]
    return None if math.isnan(reward) or math.isnan(greedy) else reward - greedy


@pytest.mark.parametrize("seed", range(30))
def test_the_greedy_answer_is_the_baseline(seed):
    samples = make_step(seed)
    rows = [row for row, (_, _, greedy) in enumerate(samples) if not greedy]
    algorithm, inputs = ReMax(), inputs_of(samples, rows)
    columns, metrics = algorithm.compute_advantages(inputs)
    wanted = [formula(samples, row) for row in rows]
    found = columns["advantages"].double().split(inputs.response_lengths.tolist())
    for of_sample, value in zip(found, wanted, strict=True):
        assert (of_sample - (value or 0.0)).abs().max() <= 3e-7
    left_out = algorithm.left_out(inputs)
    for row, value in zip(rows, wanted, strict=True):
        assert bool(left_out[row]) or math.isnan(samples[row][1]) or value is not None
        assert not left_out[row] or value is None
    assert metrics["reward/failed"] == sum(math.isnan(samples[row][1]) for row in rows)
    num_dropped = sum(value is None and not math.isnan(samples[row][1]) for row, value in zip(rows, wanted))
    assert metrics["remax/without_baseline"] == num_dropped
    assert inputs.num_trained == len(rows)
    assert inputs.num_scored == sum(not math.isnan(samples[row][1]) for row in rows)


@pytest.mark.parametrize("seed", range(30))
def test_the_recomputation_agrees(seed):
    samples = make_step(seed)
    reference = ReferenceInputs(
        rewards={row: reward for row, (_, reward, _) in enumerate(samples)},
        positions={row: row for row in range(len(samples))},
        groups={
            row: [other for other, sample in enumerate(samples) if sample[0] == group]
            for row, (group, _, _) in enumerate(samples)
        },
        samples=range(len(samples)),
        columns=lambda sample, name: torch.zeros(2),
        kl_coef=0.0,
        lengths=dict.fromkeys(range(len(samples)), 2),
        untrained=frozenset(row for row, (_, _, greedy) in enumerate(samples) if greedy),
    )
    for row, (_, _, greedy) in enumerate(samples):
        if not greedy:
            values = ReMax().reference_advantages(reference, row)["advantages"].values
            assert values == pytest.approx([formula(samples, row) or 0.0] * 2, abs=1e-12)


def test_the_kl_of_a_step_is_a_mean_over_what_is_trained_on():
    """The greedy answer has no tokens on a rank, so it must not count among the responses."""
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0, 1.0]),
        group_ids=torch.tensor([4, 4, 4]),
        rows=torch.tensor([0, 1]),
        response_lengths=torch.tensor([2, 1]),
        kl_coef=0.5,
        sum_over_ranks=lambda values: values,
        sample_lengths=torch.tensor([2, 1, 5]),
        is_untrained=torch.tensor([False, False, True]),
        old_log_probs=torch.tensor([-1.0, -2.0, -3.0]),
        ref_log_probs=torch.tensor([-1.5, -2.0, -4.0]),
    )
    columns, metrics = ReMax(kl_mode="reward", kl_coef=0.5, kl_estimator="k1").compute_advantages(inputs)
    assert metrics["kl/per_response"] == 0.75 and metrics["kl/coef"] == 0.5
    assert columns["advantages"].tolist() == [-0.25, -0.25, -1.5]
