"""Define the inputs of an algorithm that uses the single scores of a response (`takes_scores`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ROUNDING = 1e-9
"""Relative; the scores and their sum are numbers of 53 bits."""


@dataclass(frozen=True, slots=True)
class StepScores:
    """The single scores of all samples of a step. The weighted sum of a sample's scores is its reward.

    Example: StepScores({"correct": [1.0, 0.0], "short": [0.5, 0.9]}, {"correct": 1.0, "short": 0.2})
        are two samples with the rewards 1.1 and 0.18."""

    of: Mapping[str, Sequence[float]]
    """Name -> score of each sample; NaN where a sample has none, or where its reward failed."""
    weights: Mapping[str, float]
    """Name -> weight of the score in the reward."""
    multiplier: float = 0.0
    """Factor of the cost in this step, for an algorithm with a `LagrangeMultiplier`."""

    def required(self, name: str, flag: str) -> Sequence[float]:
        """Return the score of this name of each sample; NaN where its reward failed.

        Args:
            flag: names the score, for the error.
        Raises: ValueError if the reward of a sample has no such score."""
        of_samples = zip(*self.of.values(), strict=True)
        failed = [all(map(math.isnan, scores)) for scores in of_samples]
        found = self.of.get(name, [math.nan] * len(failed))
        lacking = [at for at, lost in enumerate(failed) if not lost and math.isnan(found[at])]
        if lacking:
            known = [one for one, scores in self.of.items() if not math.isnan(scores[lacking[0]])]
            raise ValueError(
                f"{flag} ({name}): the scores of the reward are {', '.join(known)}, for {len(lacking)} of "
                f"{len(failed)} responses. Let --reward-function return "
                f"{{'scores': {{..., '{name}': ...}}}} for every response, or name another score."
            )
        return found


def scores_of_step(
    sample_ids: Sequence[int],
    group_ids: Sequence[int],
    rewards: Sequence[float | None],
    scores: Mapping[str, Sequence[float | None]],
    weights: Mapping[str, float],
    multiplier: float | None = None,
) -> StepScores:
    """Return the scores of a step, after checking that they add up to the rewards.

    Args:
        rewards: the weighted sums, which digests bind to the samples.
        scores: name -> score of each sample.
        weights: name -> its weight in the reward.
        multiplier: factor of the cost, if the algorithm has one.
    Raises: ValueError for a sample whose scores do not add up to its reward, or that has not the names of its
        group."""
    names_of: dict[int, tuple[int, list[str]]] = {}
    for at, (sample, group, reward) in enumerate(zip(sample_ids, group_ids, rewards, strict=True)):
        if reward is None:
            continue
        mine = {name: of_name[at] for name, of_name in scores.items() if of_name[at] is not None}
        terms = [weights[name] * value for name, value in mine.items() if value is not None]
        if not abs(math.fsum(terms) - reward) <= _ROUNDING * math.fsum([1.0, *map(abs, terms)]):
            raise ValueError(
                f"sample {sample} has the reward {reward:g}, and its scores are {mine} with the weights "
                f"{dict(weights)}. They must add up. A loop that changes batch.rewards cannot use an algorithm "
                "that learns from single scores, as --algorithm gdpo; try --algorithm grpo."
            )
        other, names = names_of.setdefault(group, (sample, [*mine]))
        if names != [*mine]:
            raise ValueError(
                f"samples {other} and {sample} answer one prompt, and have the scores {names} and {[*mine]}. "
                "A score that a response does not earn is 0.0: let the reward function return the same names "
                "for every response to a prompt."
            )
    failed = [reward is None for reward in rewards]
    values = {
        name: [
            math.nan if lost or value is None else value for lost, value in zip(failed, of_name, strict=True)
        ]
        for name, of_name in scores.items()
    }
    return StepScores(values, weights, 0.0 if multiplier is None else multiplier)
