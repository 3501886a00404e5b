"""Pairs of sampled responses: which they are, and the slope of DPO's loss by each token, against a plain
float64 loop.

pytest tests/algorithms/test_online_dpo.py"""

import math

import pytest
import torch

from megarl.algorithms import REGISTRY, AdvantageInputs
from megarl.config.errors import FieldErrors

OnlineDPO = REGISTRY["online-dpo"]
NAN = math.nan
GROUPS = [7, 7, 7, 3, 3, 3, 5, 5, 9, 9, 9]
REWARDS = [0.5, 1.0, 0.0, 1.0, 1.0, NAN, NAN, 0.25, 2.0, 2.0, -1.0]
LENGTHS = [3, 1, 4, 2, 2, 3, 1, 2, 5, 2, 3]
PAIRS = [(1, 2), (8, 10)]  # of equal ones the first; groups 3 and 5 have no two different valid rewards


def columns():
    generator = torch.Generator().manual_seed(3)
    return -2 * torch.rand(2, sum(LENGTHS), generator=generator) - 0.05


def inputs(rows, rewards=REWARDS, total=lambda values: values):
    old, ref = columns()
    part = lambda column: torch.cat([torch.zeros(0), *(column.split(LENGTHS)[row] for row in rows)])
    return AdvantageInputs(
        rewards=torch.tensor(rewards),
        group_ids=torch.tensor(GROUPS),
        rows=torch.tensor(rows, dtype=torch.int64),
        response_lengths=torch.tensor([LENGTHS[row] for row in rows], dtype=torch.int64),
        kl_coef=0.0,
        sum_over_ranks=total,
        sample_lengths=torch.tensor(LENGTHS),
        old_log_probs=part(old),
        ref_log_probs=part(ref),
    )


def wanted(beta, smoothing):
    """Mean loss of the pairs, and its slope by each sample's sum of log-probs, from the paper's formula."""
    old, ref = ([float(x.double().sum()) for x in column.split(LENGTHS)] for column in columns())
    loss, slopes = 0.0, [0.0] * len(LENGTHS)
    for best, worst in PAIRS:
        m = beta * ((old[best] - ref[best]) - (old[worst] - ref[worst]))
        p = 1 / (1 + math.exp(-m))
        loss += (-(1 - smoothing) * math.log(p) - smoothing * math.log(1 - p)) / len(PAIRS)
        slope = beta * (-(1 - smoothing) * (1 - p) + smoothing * p) / len(PAIRS)
        slopes[best], slopes[worst] = slope, -slope
    return loss, slopes


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("order", [range(11), [9, 4, 1, 0, 10, 2, 8, 3, 7, 6, 5]], ids=["plain", "mixed"])
def test_the_slope_is_that_of_the_formula(smoothing, order):
    algorithm = OnlineDPO(beta=0.3, label_smoothing=smoothing)
    loss, slopes = wanted(0.3, smoothing)
    given, metrics = algorithm.compute_advantages(inputs([*order]))
    expected = [-slopes[row] for row in order for _ in range(LENGTHS[row])]
    assert given["advantages"].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-12)  # fp32 of float64
    assert metrics["policy/loss"] == pytest.approx(loss, rel=1e-12)
    assert metrics["online_dpo/pairs"] == 2 and metrics["reward/failed"] == 2
    in_pairs = {row for pair in PAIRS for row in pair}
    assert algorithm.left_out(inputs([*order])).tolist() == [row not in in_pairs for row in range(11)]


def test_parts_of_ranks_add_up():
    algorithm, split = OnlineDPO(), [[8, 1, 3], [], [0, 2, 4, 5, 6, 7, 9, 10]]
    sums = [[], [], []]
    for rank, rows in enumerate(split):
        algorithm.compute_advantages(
            inputs(rows, total=lambda values, rank=rank: (sums[rank].append(values.clone()), values)[1])
        )
    assert len({len(one) for one in sums}) == 1  # collectives
    whole = algorithm.compute_advantages(inputs([*range(11)]))
    of_sample = dict(enumerate(whole[0]["advantages"].split(LENGTHS)))
    metrics = {}
    for rows in split:
        totals = iter([sum(one) for one in zip(*sums, strict=True)])
        given, own = algorithm.compute_advantages(
            inputs(rows, total=lambda values, totals=totals: next(totals).clone())
        )
        expected = torch.cat([torch.zeros(0), *(of_sample[row] for row in rows)])
        assert torch.allclose(given["advantages"], expected, rtol=1e-6, atol=0)
        for name, value in own.items():
            metrics[name] = metrics.get(name, 0.0) + value
    for name in ("policy/loss", "online_dpo/pairs", "rewards/margins", "rewards/accuracies", "logps/chosen"):
        assert metrics[name] == pytest.approx(whole[1][name], rel=1e-9), name


def test_without_a_pair_nothing_is_learnt():
    given, metrics = OnlineDPO().compute_advantages(inputs([*range(11)], [1.0] * 11))
    assert given["advantages"].tolist() == [0.0] * sum(LENGTHS) and metrics["policy/loss"] == 0
    assert metrics["online_dpo/pairs"] == 0 and "rewards/margins" not in metrics
    assert OnlineDPO().left_out(inputs([*range(11)], [1.0] * 11)).all()


def test_log_probs_of_the_data_are_refused():
    with pytest.raises(FieldErrors, match="is for answers in the data"):
        OnlineDPO(precompute_ref_log_probs=True)
