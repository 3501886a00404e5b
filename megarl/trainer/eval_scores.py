"""Estimate how good a model is from the rewards of held-out samples: means, pass@k, majority votes.

Every number is a mean over prompts with a 95 % confidence interval whose unit is the prompt: samples of one
prompt are not independent. See docs/evaluation.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

Z_95 = 1.96
"""Quantile of the normal distribution for an interval that holds 95 % of it."""


@dataclass(frozen=True, slots=True)
class EvalSample:
    """One scored response to a held-out row."""

    row: int
    index: int
    """Number of the response among those of its row."""
    source: str
    """The row's data_source."""
    reward: float | None
    """None if the reward failed."""
    answer: str | None
    """Answer that the reward function found: "" if it found none, None if the function names no answers."""
    length: int
    truncated: bool
    failure: str | None = None
    """Reason why the reward is None."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its standard error, None for fewer than two prompts."""

    value: float
    standard_error: float | None
    num_prompts: int

    @property
    def margin(self) -> float | None:
        """Half the width of the 95 % confidence interval."""
        return None if self.standard_error is None else Z_95 * self.standard_error


def clustered_mean(clusters: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean of all values with a standard error that is clustered by prompt.

    SE = sqrt(C / (C - 1) * sum over prompts of (sum of the prompt's deviations from the mean)^2) / N with C
    prompts and N values: Miller 2024 (arXiv:2411.00640, section 2.2) with the usual factor C / (C - 1). If
    every prompt has equally many values, SE is the standard deviation of the prompts' means over sqrt(C).

    Args:
        clusters: values of each prompt; a prompt without values is left out."""
    clusters = [values for values in clusters if values]
    flat = [value for values in clusters for value in values]
    if not flat:
        return Estimate(math.nan, None, 0)
    mean, count = sum(flat) / len(flat), len(clusters)
    if count < 2:
        return Estimate(mean, None, count)
    squares = sum(math.fsum(value - mean for value in values) ** 2 for values in clusters)
    return Estimate(mean, math.sqrt(count / (count - 1) * squares) / len(flat), count)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples is right.

    This is equation 1 of Chen et al. 2021 (arXiv:2107.03374): 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Return the unbiased estimate of the expected highest reward of k samples.

    It is the mean of the maximum over all subsets of k samples. The i-th smallest of n rewards is the maximum
    of C(i - 1, k - 1) of them. For rewards of 0 and 1 this is pass@k."""
    subsets = math.comb(len(rewards), k)
    ranked = enumerate(sorted(rewards), start=1)
    return math.fsum(math.comb(i - 1, k - 1) / subsets * reward for i, reward in ranked)


def majority_reward(samples: Sequence[EvalSample]) -> float:
    """Return the reward of the answer that most of the scored samples gave, 0 if none has an answer.

    Of equally frequent answers the one that was sampled first counts. The reward is that of the first sample
    with the answer."""
    votes = Counter(sample.answer for sample in samples if sample.answer)
    if not votes:
        return 0.0
    most = max(votes.values())  # a Counter keeps the order in which answers were first seen
    winner = next(answer for answer, count in votes.items() if count == most)
    return next(sample.reward for sample in samples if sample.answer == winner and sample.reward is not None)


def powers_of_two(last: int) -> list[int]:
    """Return 1, 2, 4, ... below `last`, and `last`."""
    return [*(2**i for i in range(last.bit_length()) if 2**i < last), last]


class Scores:
    """Estimates from the samples of some held-out rows.

    Samples whose reward failed count in `failed` alone.

    Args:
        samples: sampled or greedy responses, in the order of rows."""

    def __init__(self, samples: Sequence[EvalSample]) -> None:
        self.failed = [sample for sample in samples if sample.reward is None]
        self.by_row: dict[int, list[EvalSample]] = {}
        for sample in samples:
            of_row = self.by_row.setdefault(sample.row, [])
            if sample.reward is not None:
                of_row.append(sample)
        scored = [*self.scored]
        self.mean_length = sum(sample.length for sample in scored) / max(1, len(scored))
        self.truncated = sum(sample.truncated for sample in scored) / max(1, len(scored))

    @property
    def scored(self) -> Iterator[EvalSample]:
        return (sample for samples in self.by_row.values() for sample in samples)

    @property
    def is_right_or_wrong(self) -> bool:
        """Whether every reward is 0 or 1, so that their mean is an accuracy."""
        return all(sample.reward in (0.0, 1.0) for sample in self.scored)

    @property
    def has_answers(self) -> bool:
        """Whether the reward function names the answers that it finds."""
        return any(sample.answer is not None for sample in self.scored)

    @property
    def mean(self) -> Estimate:
        """Mean reward of all samples: mean@n, the accuracy if rewards are 0 and 1."""
        return clustered_mean(self._rewards())

    def pass_at(self, k: int) -> Estimate:
        """Return pass@k over the rows that have at least k rewards."""
        return self._per_row(k, lambda rewards: pass_at_k(len(rewards), rewards.count(1.0), k))

    def best_at(self, k: int) -> Estimate:
        """Return best@k over the rows that have at least k rewards."""
        return self._per_row(k, lambda rewards: best_at_k(rewards, k))

    @property
    def majority(self) -> Estimate:
        """Mean reward of the majority's answers, maj@n, over the rows whose rule names answers."""
        voting = [
            samples
            for samples in self.by_row.values()
            if any(sample.answer is not None for sample in samples)
        ]
        return clustered_mean([[majority_reward(samples)] for samples in voting])

    def _per_row(self, k: int, value: Callable[[list[float]], float]) -> Estimate:
        return clustered_mean([[value(rewards)] for rewards in self._rewards() if len(rewards) >= k])

    def _rewards(self) -> list[list[float]]:
        return [
            [sample.reward for sample in samples if sample.reward is not None]
            for samples in self.by_row.values()
        ]


def of_sources(samples: Iterable[EvalSample]) -> dict[str, list[EvalSample]]:
    """Return data source -> its samples, in the order in which the sources appear."""
    found: dict[str, list[EvalSample]] = {}
    for sample in samples:
        found.setdefault(sample.source, []).append(sample)
    return found
