"""Tokens that clip-cov and kl-cov select, against a plain loop over float64 numbers, over any split between ranks.

pytest tests/algorithms/test_token_selection.py"""

import random

import pytest
import torch

from megarl.algorithms import GRPO, AdvantageInputs
from megarl.algorithms.token_selection import take_largest

LENGTHS = [5, 40, 1, 17, 33, 2, 60, 12]
REWARDS = [1.0, -0.5, float("nan"), 0.25, -1.5, 2.0, 0.5, float("nan")]
GROUPS = [7, 7, 7, 7, 9, 9, 9, 9]
SPLITS = [[[0, 1, 2, 3, 4, 5, 6, 7]], [[6, 0], [], [7, 1, 2], [5, 4, 3]]]


def log_probs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [-3 * torch.rand(length, generator=generator) for length in LENGTHS]


def select(algorithm, split, old):
    """Sample -> marks of its tokens, and the metrics, on ranks with these samples, whose sums are added up."""

    def on_rank(rows, total):
        lengths = torch.tensor([LENGTHS[row] for row in rows], dtype=torch.int64)
        inputs = AdvantageInputs(
            rewards=torch.tensor(REWARDS),
            group_ids=torch.tensor(GROUPS),
            rows=torch.tensor(rows, dtype=torch.int64),
            response_lengths=lengths,
            kl_coef=0.0,
            sum_over_ranks=total,
            old_log_probs=torch.cat([torch.zeros(0), *(old[row] for row in rows)]),
        )
        columns, metrics = algorithm.select_tokens(inputs, inputs.spread(inputs.rewards.nan_to_num(0.0)))
        return columns["selected_tokens"].split(lengths.tolist()), metrics

    totals = []  # one sum after the other: its parts need the sums before it
    while True:
        parts, is_new = [], False
        for rows in split:
            known = iter(totals)

            def total(values, known=known):
                nonlocal is_new
                if (value := next(known, None)) is not None:
                    return value.clone()
                is_new = True
                parts.append(values.clone())
                raise StopIteration

            try:
                on_rank(rows, total)
            except StopIteration:
                pass
        if not is_new:
            break
        assert len(parts) == len(split)  # every rank sums equally often
        totals.append(sum(parts))
    marks, metrics = {}, {}
    for rows in split:
        known = iter(totals)
        found, of_rank = on_rank(rows, lambda values, known=known: next(known).clone())
        marks |= {row: part.tolist() for row, part in zip(rows, found)}
        metrics = {name: metrics.get(name, 0.0) + value for name, value in of_rank.items()}
    return marks, metrics


def covariances(old):
    """(sample, position) -> covariance, of the samples with a reward."""
    tokens = {
        (row, at): (float(value), REWARDS[row])
        for row, values in enumerate(old)
        if REWARDS[row] == REWARDS[row]
        for at, value in enumerate(values)
    }
    means = [sum(values) / len(tokens) for values in zip(*tokens.values())]
    return {token: (p - means[0]) * (a - means[1]) for token, (p, a) in tokens.items()}


def marked(marks):
    return {(row, at) for row, values in marks.items() for at, value in enumerate(values) if value}


@pytest.mark.parametrize("split", SPLITS, ids=["one", "four"])
@pytest.mark.parametrize("share", [1e-6, 0.1, 0.9])
def test_kl_cov_takes_the_largest(share, split):
    old = log_probs()
    cov = covariances(old)
    marks, metrics = select(GRPO(policy_loss="kl-cov", cov_share=share), split, old)
    count = max(int(share * len(cov)), 1)
    assert marked(marks) == set(sorted(cov, key=cov.get)[-count:])
    assert metrics["covariance/selected"] == count
    assert metrics["covariance/mean"] == pytest.approx(sum(cov.values()) / len(cov), rel=1e-6)


@pytest.mark.parametrize("split", SPLITS, ids=["one", "four"])
def test_clip_cov_draws_from_those_within_bounds(split):
    chosen = []
    for seed in range(20):
        old = log_probs(seed)
        cov = covariances(old)
        eligible = {token for token, value in cov.items() if 0.1 < value < 1.5}
        algorithm = GRPO(policy_loss="clip-cov", cov_share=0.1, cov_low=0.1, cov_high=1.5)
        marks, _ = select(algorithm, split, old)
        assert marked(marks) <= eligible and len(marked(marks)) == int(0.1 * len(cov)) < len(eligible)
        assert marks == select(algorithm, SPLITS[0], old)[0]
        chosen += [
            sorted(cov[token] for token in eligible).index(cov[token]) / len(eligible)
            for token in marked(marks)
        ]
    # Uniform ranks have mean 0.5, with a standard error of 0.29 / sqrt(300) = 0.017.
    assert len(chosen) > 250 and abs(sum(chosen) / len(chosen) - 0.5) < 0.07
    few = GRPO(policy_loss="clip-cov", cov_share=0.9, cov_low=1.4, cov_high=1.5)
    assert marked(select(few, split, log_probs())[0]) == {
        t for t, v in covariances(log_probs()).items() if 1.4 < v < 1.5
    }


def test_largest_keys_of_all_ranks_as_numbers_without_sign():
    rng = random.Random(0)
    for trial in range(50):
        keys = [rng.getrandbits(64) >> rng.choice((0, 0, 20, 50)) for _ in range(rng.randint(1, 60))]
        keys = list(dict.fromkeys(keys))
        count = rng.randint(1, 60)
        signed = torch.tensor([key - (1 << 64) if key >> 63 else key for key in keys])
        found = take_largest(signed, count, lambda values: values)
        assert {key for key, is_taken in zip(keys, found.tolist()) if is_taken} == set(sorted(keys)[-count:])


def test_the_default_shares_and_bounds_are_the_papers():
    clip, kl = GRPO(policy_loss="clip-cov"), GRPO(policy_loss="kl-cov")
    assert (clip.cov_share, clip.cov_low, clip.cov_high, clip.clip_eps_high) == (2e-4, 1.0, 5.0, 0.2)
    assert (kl.cov_share, kl.cov_kl_coef, kl.clip_eps_low) == (2e-3, 1.0, None)
