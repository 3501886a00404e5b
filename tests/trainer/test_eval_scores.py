"""The numbers of an evaluation against independent formulas: subsets that are enumerated, and the statistics
module."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from megarl.trainer.eval_scores import (
    EvalSample,
    Scores,
    best_at_k,
    clustered_mean,
    majority_reward,
    pass_at_k,
    powers_of_two,
)


def sample(row: int, index: int, reward: float | None, answer: str | None = None) -> EvalSample:
    return EvalSample(row, index, "source", reward, answer, length=10, truncated=False)


def test_a_sample_without_a_reward_counts_in_no_number() -> None:
    samples = [
        EvalSample(0, 0, "source", 1.0, None, length=10, truncated=False),
        EvalSample(0, 1, "source", None, None, length=1000, truncated=True, failure="it hung"),
    ]
    scores = Scores(samples)
    assert (scores.mean_length, scores.truncated, scores.mean.value) == (10.0, 0.0, 1.0)
    assert scores.failed == samples[1:] and Scores(samples[1:]).mean_length == 0.0


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_equals_the_product_of_the_paper() -> None:
    """Chen et al. 2021, figure 3: 1 - prod(1 - k / i for i in n - c + 1 ... n)."""
    for n, c, k in ((200, 7, 100), (64, 1, 8), (1000, 500, 3)):
        by_product = 1 - math.prod(1 - k / i for i in range(n - c + 1, n + 1))
        assert pass_at_k(n, c, k) == pytest.approx(by_product, rel=1e-12)


def test_best_at_k_is_the_mean_maximum_of_all_subsets() -> None:
    rewards = [0.5, -1.0, 0.25, 0.5, 3.0, 0.0]
    for k in range(1, 7):
        maxima = [max(subset) for subset in itertools.combinations(rewards, k)]
        assert best_at_k(rewards, k) == pytest.approx(statistics.fmean(maxima), rel=1e-14)
    right = [1.0, 0.0, 0.0, 1.0, 0.0]
    assert all(best_at_k(right, k) == pytest.approx(pass_at_k(5, 2, k)) for k in range(1, 6))


def test_the_interval_is_that_of_the_prompts_means() -> None:
    draw = random.Random(0)
    clusters = [[draw.random() for _ in range(4)] for _ in range(30)]
    means = [statistics.fmean(cluster) for cluster in clusters]
    found = clustered_mean(clusters)
    assert found.value == pytest.approx(statistics.fmean(means), rel=1e-14)
    assert found.standard_error == pytest.approx(statistics.stdev(means) / 30**0.5, rel=1e-12)
    assert found.margin == 1.96 * found.standard_error and found.num_prompts == 30
    # four copies of a sample tell no more than one
    copies = clustered_mean([cluster[:1] * 4 for cluster in clusters])
    assert copies.standard_error == pytest.approx(
        clustered_mean([cluster[:1] for cluster in clusters]).standard_error, rel=1e-12
    )


def test_the_interval_of_clusters_of_unequal_size() -> None:
    """By hand: values 1, 1, 0 of one prompt and 0 of another; mean 1/2, sums of deviations 1/2 and -1/2."""
    found = clustered_mean([[1.0, 1.0, 0.0], [0.0], []])
    assert (found.value, found.num_prompts) == (0.5, 2)
    assert found.standard_error == pytest.approx(math.sqrt(2 / 1 * (0.25 + 0.25)) / 4, rel=1e-15)
    assert clustered_mean([[1.0, 0.0]]).margin is None and math.isnan(clustered_mean([[]]).value)


def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    draw = random.Random(1)
    hits, repeats = 0, 1000
    for _ in range(repeats):
        chances = [draw.random() for _ in range(100)]
        found = clustered_mean([[float(draw.random() < p) for _ in range(4)] for p in chances])
        hits += abs(found.value - 0.5) <= found.margin
    assert 0.93 <= hits / repeats <= 0.97


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        (["17", "18", "17", ""], 1.0),
        (["18", "17", "18"], 0.0),
        (["18", "17"], 0.0),  # a tie: the first one counts
        (["17", "18"], 1.0),
        (["18", "17", "17", "18"], 0.0),
        (["", "", "17"], 1.0),  # no answer is no vote
        (["", ""], 0.0),
    ],
)
def test_the_majority_s_answer_counts(answers: list[str], reward: float) -> None:
    samples = [sample(0, i, float(answer == "17"), answer) for i, answer in enumerate(answers)]
    assert majority_reward(samples) == reward


def test_rows_whose_rule_names_no_answers_have_no_vote() -> None:
    """One reward function may name answers of some sources only. A row in which it found none counts as 0."""
    samples = [sample(0, i, 1.0, "17") for i in range(2)]
    samples += [sample(1, i, 1.0, None) for i in range(2)]
    assert (Scores(samples).majority.value, Scores(samples).majority.num_prompts) == (1.0, 1)
    samples += [sample(2, 0, 0.0, ""), sample(2, 1, 0.0, None), sample(3, 0, None, "17")]
    assert (Scores(samples).majority.value, Scores(samples).majority.num_prompts) == (0.5, 2)
    assert Scores(samples).mean.num_prompts == 3


def test_a_failed_reward_counts_nowhere_but_in_failed() -> None:
    rewards = {0: [1.0, None, 0.0], 1: [1.0, 1.0, 1.0], 2: [None, None, None]}
    samples = [sample(row, i, reward) for row, found in rewards.items() for i, reward in enumerate(found)]
    scores = Scores(samples)
    assert len(scores.failed) == 4 and scores.mean.value == 0.8
    assert scores.pass_at(2).value == (1.0 + 1.0) / 2 and scores.pass_at(2).num_prompts == 2
    assert (scores.pass_at(3).value, scores.pass_at(3).num_prompts) == (1.0, 1)
    assert scores.is_right_or_wrong and not scores.has_answers
    assert not Scores([sample(0, 0, 0.5)]).is_right_or_wrong


def test_powers_of_two_end_with_the_number_of_samples() -> None:
    assert [powers_of_two(n) for n in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]
