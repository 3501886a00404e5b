"""Advantages of RLOO, OPO, MaxRL, REINFORCE++ and its baseline form against the formulas of their papers, in
loops of float64 numbers, whole and spread over ranks.

    pytest tests/algorithms/test_advantages.py

Bound: 4e-6 relative to the largest advantage, as for PPO's whitening."""

import math
import statistics

import pytest
import torch

from megarl.algorithms import REGISTRY, AdvantageInputs
from megarl.metrics import combine

KL_COEF = 0.4  # of the controller: not the flag's
REWARDS = [
    ("a", 1.0, 3),
    ("b", 0.25, 6),
    ("a", 0.0, 1),
    ("a", math.nan, 4),
    ("b", 0.5, 9),
    ("c", 2.0, 2),
    ("b", 1.0, 5),
    ("a", 1.0, 7),
    ("d", -1.0, 4),
    ("d", 0.5, 2),
]
"""Group, reward and response length. c has one member; the mean of d is below 0; one reward failed."""


def make_samples():
    generator = torch.Generator().manual_seed(0)
    samples = []
    for group, reward, length in REWARDS:
        old = -2 * torch.rand(length, generator=generator)
        ref = old + 0.5 * torch.randn(length, generator=generator)
        samples.append(dict(group=group, reward=reward, old=old, ref=ref))
    return samples


def k2(sample):
    return [(a - b) ** 2 / 2 for a, b in zip(sample["old"].tolist(), sample["ref"].tolist())]


def in_group(samples, sample):
    return [s for s in samples if s["group"] == sample["group"] and not math.isnan(s["reward"])]


def of_response(sample, kl):
    """Reward less the KL of the response, as --kl-mode reward counts it in algorithms of groups."""
    return sample["reward"] - (KL_COEF * sum(k2(sample)) if kl else 0.0)


def rloo(samples, sample, kl):
    others = [of_response(s, kl) for s in in_group(samples, sample) if s is not sample]
    return of_response(sample, kl) - statistics.fmean(others) if others else 0.0


def opo(samples, sample, kl):
    """2505.23585, eq. 7: sum of length times reward over the sum of lengths."""
    group = in_group(samples, sample)
    if len(group) < 2:
        return 0.0
    lengths = [len(s["old"]) for s in group]
    baseline = sum(n * of_response(s, kl) for n, s in zip(lengths, group)) / sum(lengths)
    return of_response(sample, kl) - baseline


def maxrl(samples, sample, kl):
    group = [of_response(s, kl) for s in in_group(samples, sample)]
    mean = statistics.fmean(group)
    return (of_response(sample, kl) - mean) / mean if len(group) > 1 and mean > 0 else 0.0


def whitened(samples, kl, baseline):
    """Return-to-go of each token, then minus the mean and divided by the deviation of all tokens."""
    returns = {}
    for index, sample in enumerate(samples):
        if math.isnan(sample["reward"]):
            continue
        group = [s["reward"] for s in in_group(samples, sample)]
        reward = sample["reward"] - (statistics.fmean(group) if baseline else 0.0)
        costs = [KL_COEF * x for x in k2(sample)] if kl else [0.0] * len(sample["old"])
        returns[index] = [reward - sum(costs[t:]) for t in range(len(costs))]
    everything = [x for row in returns.values() for x in row]
    mean, std = statistics.fmean(everything), statistics.stdev(everything)
    return [
        [(x - mean) / std for x in returns[i]] if i in returns else [0.0] * len(s["old"])
        for i, s in enumerate(samples)
    ]


def expected(name, samples, kl):
    """Advantages of each token of each sample, as lists."""
    if name.startswith("reinforce"):
        return whitened(samples, kl, baseline=name.endswith("baseline"))
    formula = {"rloo": rloo, "opo": opo, "maxrl": maxrl}[name]
    return [[0.0 if math.isnan(s["reward"]) else formula(samples, s, kl)] * len(s["old"]) for s in samples]


def inputs_of(samples, rows, sum_over_ranks=lambda total: total):
    mine = [samples[row] for row in rows]
    cat = lambda name: torch.cat([torch.zeros(0), *(s[name] for s in mine)])
    return AdvantageInputs(
        rewards=torch.tensor([s["reward"] for s in samples]),
        group_ids=torch.tensor([1000 * ord(s["group"]) for s in samples]),
        rows=torch.tensor(rows, dtype=torch.int64),
        response_lengths=torch.tensor([len(s["old"]) for s in mine], dtype=torch.int64),
        sample_lengths=torch.tensor([len(s["old"]) for s in samples]),
        kl_coef=KL_COEF,
        sum_over_ranks=sum_over_ranks,
        old_log_probs=cat("old"),
        ref_log_probs=cat("ref"),
    )


NAMES = ["rloo", "opo", "maxrl", "reinforce++", "reinforce++-baseline"]
KLS = [{}, dict(kl_mode="reward", kl_coef=0.3, kl_estimator="k2")]


@pytest.mark.parametrize("kl", KLS, ids=["no-kl", "kl-in-reward"])
@pytest.mark.parametrize("name", NAMES)
def test_advantages_equal_the_papers_formula(name, kl):
    samples = make_samples()
    columns, metrics = REGISTRY[name](**kl).compute_advantages(inputs_of(samples, list(range(10))))
    wanted = torch.tensor(sum(expected(name, samples, bool(kl)), []), dtype=torch.float64)
    assert wanted.abs().max() > 0.5 and (wanted != 0).sum() > 20
    gap = (columns["advantages"].double() - wanted).abs().max()
    assert gap <= 4e-6 * wanted.abs().max()
    assert metrics["reward/failed"] == 1
    assert metrics["advantage/max_abs"] == pytest.approx(float(wanted.abs().max()), rel=1e-5)


@pytest.mark.parametrize("split", [[[4, 0, 9], [6, 3, 1, 7], [5, 2, 8]], [[], list(range(10)), []]])
@pytest.mark.parametrize("kl", KLS, ids=["no-kl", "kl-in-reward"])
@pytest.mark.parametrize("name", NAMES)
def test_does_not_depend_on_who_holds_what(name, kl, split):
    samples, algorithm = make_samples(), REGISTRY[name](**kl)
    whole, whole_metrics = algorithm.compute_advantages(inputs_of(samples, list(range(10))))
    contributions: list[torch.Tensor] = []

    def stop(mine):
        contributions.append(mine.clone())
        raise ZeroDivisionError

    for rows in split:
        try:
            algorithm.compute_advantages(inputs_of(samples, rows, stop))
        except ZeroDivisionError:
            pass
    assert len(contributions) in (0, len(split)), "every rank must take part in a collective"
    parts = whole["advantages"].split([len(s["old"]) for s in samples])
    found = [
        algorithm.compute_advantages(inputs_of(samples, rows, lambda _: sum(contributions))) for rows in split
    ]
    for rows, (columns, _) in zip(split, found):
        wanted = torch.cat([torch.zeros(0), *(parts[row] for row in rows)])
        torch.testing.assert_close(columns["advantages"], wanted, rtol=0, atol=1e-6)
    assert combine(metrics for _, metrics in found) == pytest.approx(whole_metrics, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_a_failed_reward_changes_nothing_for_the_others(name):
    samples = make_samples()
    others = [s for s in samples if not math.isnan(s["reward"])]
    with_it, _ = REGISTRY[name]().compute_advantages(inputs_of(samples, list(range(10))))
    without, _ = REGISTRY[name]().compute_advantages(inputs_of(others, list(range(9))))
    kept = torch.cat([with_it["advantages"][:10], with_it["advantages"][14:]])
    assert torch.equal(kept, without["advantages"]) and (with_it["advantages"][10:14] == 0).all()


def test_rloo_is_grpo_without_std_times_g_over_g_minus_1():
    samples = [s for s in make_samples() if s["group"] == "b"]
    inputs = inputs_of(samples, [0, 1, 2])
    centred = REGISTRY["grpo"](normalize_advantages_by_std=False).compute_advantages(inputs)[0]["advantages"]
    torch.testing.assert_close(
        REGISTRY["rloo"]().compute_advantages(inputs)[0]["advantages"], centred * 3 / 2, rtol=1e-6, atol=0
    )
