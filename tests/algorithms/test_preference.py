"""Losses and gradients of pairs against plain float64 formulas of the papers, over tokens that are split between
ranks.

pytest tests/algorithms/test_preference.py"""

import math

import pytest
import torch

from megarl.algorithms import REGISTRY, AdvantageInputs, LossInputs
from megarl.kernels.dpo_loss import dpo_loss_ref

DPO, IPO, KTO, ORPO, RPO, SimPO = (REGISTRY[name] for name in ("dpo", "ipo", "kto", "orpo", "rpo", "simpo"))
LENGTHS = [3, 1, 4, 7, 2, 2, 9, 5]  # chosen, rejected, chosen, ...
SCORES = [1.0, -0.5, 2.0, 1.9, 0.0, 0.0, 3.5, 0.25]


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))


def dpo(chosen, rejected, ref_chosen, ref_rejected, lengths, scores, algorithm):
    h = (chosen - ref_chosen) - (rejected - ref_rejected)
    good, bad = log_sigmoid(algorithm.beta * h), log_sigmoid(-algorithm.beta * h)
    loss = -(1 - algorithm.label_smoothing) * good - algorithm.label_smoothing * bad
    return loss - algorithm.nll_coef * chosen / lengths[0]


def ipo(chosen, rejected, ref_chosen, ref_rejected, lengths, scores, algorithm):
    sizes = lengths if algorithm.average_log_probs else (1, 1)
    h = (chosen - ref_chosen) / sizes[0] - (rejected - ref_rejected) / sizes[1]
    return (h - 1 / (2 * algorithm.beta)) ** 2


def simpo(chosen, rejected, ref_chosen, ref_rejected, lengths, scores, algorithm):
    return -log_sigmoid(
        algorithm.beta / lengths[0] * chosen - algorithm.beta / lengths[1] * rejected - algorithm.simpo_gamma
    )


def orpo(chosen, rejected, ref_chosen, ref_rejected, lengths, scores, algorithm):
    p, q = math.exp(chosen / lengths[0]), math.exp(rejected / lengths[1])
    ratio = (p / (1 - p)) / (q / (1 - q))
    return -math.log(p) - algorithm.beta * math.log(1 / (1 + 1 / ratio))


def rpo(chosen, rejected, ref_chosen, ref_rejected, lengths, scores, algorithm):
    a = 1 / (1 + math.exp(-algorithm.beta * ((chosen - ref_chosen) - (rejected - ref_rejected))))
    b = 1 / (1 + math.exp(-algorithm.eta * (scores[0] - scores[1])))
    return b * math.log(b / a) + (1 - b) * math.log((1 - b) / (1 - a))


CASES = {
    "dpo": (DPO(beta=0.3), dpo),
    "cdpo": (DPO(label_smoothing=0.2), dpo),
    "dpo+nll": (DPO(nll_coef=0.7), dpo),
    "ipo": (IPO(beta=0.2), ipo),
    "ipo-mean": (IPO(average_log_probs=True), ipo),
    "simpo": (SimPO(), simpo),
    "orpo": (ORPO(beta=0.4), orpo),
    "rpo": (RPO(beta=0.5, eta=0.8), rpo),
}


def step(seed=0):
    """(log_probs, ref_log_probs) of all tokens, sample by sample."""
    generator = torch.Generator().manual_seed(seed)
    numbers = -2 * torch.rand(2, sum(LENGTHS), generator=generator) - 0.05
    return numbers[0], numbers[1]


def on_rank(rows, log_probs, refs, total):
    """Inputs of a rank that holds these samples; `total` are the sums over all ranks, in the order asked for."""
    of_sample = [list(column.split(LENGTHS)) for column in (log_probs, refs)]
    here = [torch.cat([torch.zeros(0), *(parts[row] for row in rows)]) for parts in of_sample]
    return AdvantageInputs(
        rewards=torch.tensor(SCORES),
        group_ids=torch.arange(len(LENGTHS)) // 2,
        rows=torch.tensor(rows, dtype=torch.int64),
        response_lengths=torch.tensor([LENGTHS[row] for row in rows], dtype=torch.int64),
        kl_coef=0.0,
        sum_over_ranks=total,
        sample_lengths=torch.tensor(LENGTHS),
        old_log_probs=here[0],
        ref_log_probs=here[1],
    )


def ranks_of(algorithm, split, log_probs, refs):
    """(columns, metrics) of each rank; the sums of the ranks are added up as an all-reduce does."""
    parts = [[] for _ in split]
    for rank, rows in enumerate(split):

        def note(values, rank=rank):
            parts[rank].append(values.clone())
            return values

        algorithm.compute_advantages(on_rank(rows, log_probs, refs, note))
    totals = [sum(values) for values in zip(*parts, strict=True)]
    results = []
    for rows in split:
        sums = iter(totals)
        results.append(
            algorithm.compute_advantages(
                on_rank(rows, log_probs, refs, lambda values, sums=sums: next(sums).clone())
            )
        )
    return results


def expected(case, log_probs, refs):
    """Mean loss of the pairs, and its derivative by each sample's sum by central differences, in float64."""
    algorithm, formula = case
    sums, ref_sums = (
        [float(part.double().sum()) for part in column.split(LENGTHS)] for column in (log_probs, refs)
    )

    def loss(values):
        pairs = range(0, len(values), 2)
        losses = [
            formula(
                *values[p : p + 2],
                *ref_sums[p : p + 2],
                LENGTHS[p : p + 2],
                SCORES[p : p + 2],
                algorithm,
            )
            for p in pairs
        ]
        return sum(losses) / len(losses)

    slopes = []
    for at in range(len(sums)):
        near = [[value + (index == at) * h for index, value in enumerate(sums)] for h in (1e-4, -1e-4)]
        slopes.append((loss(near[0]) - loss(near[1])) / 2e-4)
    return loss(sums), slopes


@pytest.mark.parametrize("split", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[6, 0, 3], [], [7, 1, 2, 5, 4]]], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_formula(name, split):
    log_probs, refs = step()
    results = ranks_of(CASES[name][0], split, log_probs, refs)
    loss, slopes = expected(CASES[name], log_probs, refs)
    assert sum(metrics["policy/loss"] for _, metrics in results) == pytest.approx(loss, rel=1e-9)
    for rows, (columns, _) in zip(split, results, strict=True):
        wanted = [slope for row in rows for slope in [-slopes[row]] * LENGTHS[row]]
        assert columns["advantages"].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-8)
        assert columns["advantages"].dtype == torch.float32 and not columns["advantages"].requires_grad


def test_metrics_are_means_over_the_pairs():
    log_probs, refs = step()
    results = ranks_of(DPO(beta=0.3), [[0, 3], [1, 2, 4, 5, 6, 7]], log_probs, refs)
    total = {name: sum(metrics[name] for _, metrics in results) for name in results[0][1]}
    of_policy = [float(part.sum()) for part in log_probs.double().split(LENGTHS)]
    rewards = [
        0.3 * (mine - float(part.sum())) for mine, part in zip(of_policy, refs.double().split(LENGTHS))
    ]
    chosen, rejected = rewards[::2], rewards[1::2]
    assert total["rewards/chosen"] == pytest.approx(sum(chosen) / 4)
    assert total["rewards/rejected"] == pytest.approx(sum(rejected) / 4)
    assert total["rewards/margins"] == pytest.approx((sum(chosen) - sum(rejected)) / 4)
    assert total["rewards/accuracies"] == sum(c > r for c, r in zip(chosen, rejected)) / 4
    assert total["logps/chosen"] == pytest.approx(sum(of_policy[::2]) / 4)
    assert total["logps/rejected"] == pytest.approx(sum(of_policy[1::2]) / 4)


def test_dpo_is_the_kernels_specification():
    log_probs, refs = step()
    leaf = log_probs.clone().requires_grad_()
    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    mask, weights = torch.ones(len(leaf), dtype=torch.bool), torch.full((4,), 0.25)
    loss = dpo_loss_ref(leaf, refs, mask, cu_seqlens, weights, beta=0.3, label_smoothing=0.1)
    (gradient,) = torch.autograd.grad(loss, leaf)
    algorithm = DPO(beta=0.3, label_smoothing=0.1)
    ((columns, metrics),) = ranks_of(algorithm, [list(range(8))], log_probs, refs)
    assert metrics["policy/loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    torch.testing.assert_close(columns["advantages"], -gradient, rtol=1e-6, atol=1e-9)


def test_the_update_has_the_gradient_of_the_advantages_however_it_is_split():
    log_probs, refs = step()
    advantages = ranks_of(DPO(), [list(range(8))], log_probs, refs)[0][0]["advantages"]
    for sizes in ([33], [5, 0, 28], [1] * 33):
        leaf = log_probs.clone().requires_grad_()
        losses = [
            DPO().loss(
                LossInputs(
                    log_probs=part,
                    advantages=of_part,
                    response_lengths=torch.ones(len(part), dtype=torch.int64),
                    num_tokens=33,
                    num_sequences=8,
                    max_response_length=9,
                    kl_coef=0.0,
                )
            )
            for part, of_part in zip(leaf.split(sizes), advantages.split(sizes), strict=True)
        ]
        (gradient,) = torch.autograd.grad(sum(loss for loss, _ in losses), leaf)
        assert torch.equal(gradient, -advantages) and all(metrics == {} for _, metrics in losses)


@pytest.mark.parametrize("algorithm", [DPO(), IPO(beta=0.01), SimPO(), ORPO(), RPO()], ids=str)
@pytest.mark.parametrize("shift", [400.0, -400.0])
def test_far_from_the_reference_numbers_stay_finite(algorithm, shift):
    log_probs, refs = step()
    sample = torch.arange(8).repeat_interleave(torch.tensor(LENGTHS))
    moved = (log_probs - abs(shift) * (sample % 2 == (shift > 0))).contiguous()
    ((columns, metrics),) = ranks_of(algorithm, [list(range(8))], moved, refs)
    assert columns["advantages"].isfinite().all() and all(map(math.isfinite, metrics.values()))


def test_an_answer_of_probability_1_has_finite_odds():
    ((columns, metrics),) = ranks_of(ORPO(), [list(range(8))], torch.zeros(33), torch.zeros(33))
    assert columns["advantages"].isfinite().all() and math.isfinite(metrics["policy/loss"])


@pytest.mark.parametrize(
    "algorithm, fields, message",
    [
        (DPO, dict(beta=0.0), r"beta \(0.0\): must be above 0"),
        (DPO, dict(label_smoothing=0.5), r"label_smoothing \(0.5\): must be below 0.5"),
        (DPO, dict(nll_coef=-1.0), r"nll_coef \(-1.0\): must be at least 0"),
        (SimPO, dict(simpo_gamma=-0.1), r"simpo_gamma \(-0.1\)"),
        (RPO, dict(eta=0.0), r"eta \(0.0\)"),
    ],
)
def test_wrong_numbers_are_refused(algorithm, fields, message):
    with pytest.raises(ValueError, match=message):
        algorithm(**fields)


@pytest.mark.parametrize("shift", [0.3, -3.0], ids=["KL above 0", "KL held at 0"])
@pytest.mark.parametrize("split", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[6, 0, 3], [], [7, 1, 2, 5, 4]]], ids=str)
def test_kto_judges_each_answer_against_the_kl_of_mismatched_ones(monkeypatch, split, shift):
    """Samples 0, 2, 4, 6 are labelled answers, the others are answers to other prompts."""
    labels = [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    monkeypatch.setitem(globals(), "SCORES", labels)
    algorithm = KTO(beta=0.4, desirable_weight=1.5, undesirable_weight=0.7)
    log_probs, refs = step()
    log_probs = log_probs + shift
    ratios = [
        float(x.sum() - y.sum())
        for x, y in zip(log_probs.double().split(LENGTHS), refs.double().split(LENGTHS))
    ]
    kl = max(sum(ratios[1::2]) / 4, 0.0)
    assert (kl > 0) == (shift > 0)
    losses, slopes = [], []
    for ratio, label in zip(ratios[::2], labels[::2]):
        sign, weight = (1, 1.5) if label else (-1, 0.7)
        value = 1 / (1 + math.exp(-sign * 0.4 * (ratio - kl)))
        losses.append(weight * (1 - value))
        slopes.append(-sign * weight * 0.4 * value * (1 - value) / 4)
    results = ranks_of(algorithm, split, log_probs, refs)
    total = {name: sum(metrics[name] for _, metrics in results) for name in results[0][1]}
    assert total["policy/loss"] == pytest.approx(sum(losses) / 4, rel=1e-6)
    assert total["kl/mismatched"] == pytest.approx(kl, rel=1e-6)
    assert total["rewards/chosen"] == pytest.approx(0.4 * (ratios[0] + ratios[4]) / 2, rel=1e-6)
    assert total["rewards/margins"] == pytest.approx(total["rewards/chosen"] - total["rewards/rejected"])
    for rows, (columns, _) in zip(split, results, strict=True):
        wanted = [0.0 if row % 2 else -slopes[row // 2] for row in rows for _ in range(LENGTHS[row])]
        assert columns["advantages"].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-9)


def test_kto_without_an_undesirable_answer_has_no_metrics_of_them(monkeypatch):
    monkeypatch.setitem(globals(), "SCORES", [1.0] * 8)
    ((_, metrics),) = ranks_of(KTO(), [list(range(8))], *step())
    assert "rewards/chosen" in metrics and not {"rewards/rejected", "rewards/margins"} & metrics.keys()
