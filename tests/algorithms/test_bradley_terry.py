"""Loss and gradient of a reward model's pairs against the formula of the papers in float64, over samples that are split
between ranks.

pytest tests/algorithms/test_bradley_terry.py"""

import math

import pytest
import torch

from megarl.algorithms import REGISTRY, AdvantageInputs
from megarl.algorithms.base import ScoreLossInputs

BradleyTerry = REGISTRY["bradley-terry"]
SCORES = [0.3, -0.2, 1.5, 2.0, -0.7, -0.7, 4.0, -3.0]
"""The model's: chosen, rejected, chosen, ... The pairs 1 and 2 are not ordered as the data say."""
OF_ROWS = [1.0, -0.5, 2.0, 1.875, 0.0, 0.0, 3.5, 0.25]
CASES = {
    "plain": BradleyTerry(),
    "margin": BradleyTerry(margin=0.7),
    "margin from scores": BradleyTerry(margin=0.3, margin_from_scores=True),
    "centred": BradleyTerry(margin=0.1, center_coef=0.01),
}


def formula(algorithm, scores):
    losses = []
    for at in range(0, len(scores), 2):
        chosen, rejected = scores[at : at + 2]
        margin = algorithm.margin * ((OF_ROWS[at] - OF_ROWS[at + 1]) if algorithm.margin_from_scores else 1)
        probability = 1 / (1 + math.exp(-(chosen - rejected - margin)))
        losses.append(-math.log(probability) + algorithm.center_coef * (chosen + rejected) ** 2)
    return sum(losses) / len(losses)


def on_rank(rows, total):
    return AdvantageInputs(
        rewards=torch.tensor(OF_ROWS),
        group_ids=torch.arange(len(SCORES)) // 2,
        rows=torch.tensor(rows, dtype=torch.int64),
        response_lengths=torch.ones(len(rows), dtype=torch.int64),
        kl_coef=0.0,
        sum_over_ranks=total,
        sample_lengths=torch.ones(len(SCORES), dtype=torch.int64),
        old_scores=torch.tensor([SCORES[row] for row in rows]),
    )


@pytest.mark.parametrize("split", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[6, 0, 3], [], [7, 1, 2, 5, 4]]], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_formula(name, split):
    algorithm, exact = CASES[name], torch.tensor(SCORES).double()  # as the fp32 column holds them
    results = [algorithm.compute_advantages(on_rank(rows, lambda _: exact.clone())) for rows in split]
    wanted = formula(algorithm, exact.tolist())
    assert sum(metrics["policy/loss"] for _, metrics in results) == pytest.approx(wanted, rel=1e-12)
    assert sum(metrics["rewards/accuracies"] for _, metrics in results) == 0.5
    assert sum(metrics["rewards/margins"] for _, metrics in results) == pytest.approx(7 / 4, rel=1e-6)
    for rows, (columns, _) in zip(split, results, strict=True):
        # Central differences of the formula are exact to about 1e-9, the column is fp32.
        slopes = []
        for row in rows:
            near = [[x + (i == row) * h for i, x in enumerate(exact.tolist())] for h in (1e-5, -1e-5)]
            slopes.append((formula(algorithm, near[0]) - formula(algorithm, near[1])) / 2e-5)
        assert columns["advantages"].tolist() == pytest.approx([-x for x in slopes], rel=1e-5, abs=1e-8)


def test_the_update_has_the_gradient_of_the_advantages():
    scores, advantages = torch.tensor([0.5, -1.0], requires_grad=True), torch.tensor([0.25, -0.125])
    inputs = ScoreLossInputs(
        scores=scores,
        old_scores=scores.detach(),
        advantages=advantages,
        response_lengths=torch.ones(2, dtype=torch.int64),
        num_tokens=2,
        num_sequences=2,
        max_response_length=8,
    )
    loss, metrics = BradleyTerry().score_loss(inputs)
    loss.backward()
    assert scores.grad.tolist() == [-0.25, 0.125] and metrics == {}


def test_only_margins_from_scores_need_scores_in_the_rows():
    assert BradleyTerry().row_needs == "pair"
    assert BradleyTerry(margin=1.0, margin_from_scores=True).row_needs == "scored_pair"
