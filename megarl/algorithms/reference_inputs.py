"""Define the inputs and results of the slow references of advantages, see
`Algorithm.reference_advantages`."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megarl.algorithms.several_scores import StepScores
from megarl.algorithms.turn_rewards import TurnRewards

if TYPE_CHECKING:
    from torch import Tensor


def rounded_to_fp32(number: float) -> float:
    """Return the fp32 number nearest to `number`, as rewards are rounded when they become a tensor."""
    return struct.unpack("f", struct.pack("f", number))[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceInputs:
    """Inputs of `reference_advantages`: rewards, groups and columns of one step, looked up by sample id. What
    belongs to an episode of several samples is found under the id of its first sample, see `episode`.

    Example: samples 7 and 8 answer one prompt, and sample 7 is on this rank:
        ReferenceInputs(rewards={7: 1.0, 8: 0.0}, positions={7: 0, 8: 1}, groups={7: (7, 8), 8: (7, 8)},
        samples=[7], columns=<of sample 7>, ...)
    """

    rewards: Mapping[int, float]
    """Sample id -> reward rounded to fp32, of all samples of the step in the same order on every rank.

    NaN where the reward failed."""
    positions: Mapping[int, int]
    """Sample id -> its position in `rewards`."""
    groups: Mapping[int, Sequence[int]]
    """Sample id -> the samples of its group, including itself."""
    samples: Sequence[int]
    """Samples on this rank, with all samples of an episode."""
    columns: Callable[[int, str], Tensor]
    """Sample id on this rank, column -> [n] fp32, the values on its response tokens; what `advantage_reads`
    and `advantage_writes` name."""
    kl_coef: float
    """Factor of the KL to the reference at this step."""
    lengths: Mapping[int, int]
    """Sample id -> its response tokens, of all samples of the step."""
    untrained: frozenset[int] = frozenset()
    """Samples that are scored and not trained on."""
    sums: Sequence[float] = ()
    """`reference_sums`, added up over the data-parallel ranks."""
    turns: Mapping[int, TurnRewards | None] | None = None
    """With --turn-rewards: sample id -> its answers; None where the reward failed."""
    scores: StepScores | None = None
    """If `takes_scores`: the single scores of all samples of the step, by their positions."""
    episode_of: Mapping[int, int] = field(default_factory=dict)
    """Further samples of an episode that are on this rank -> the episode."""

    def episode(self, sample: int) -> int:
        """Return the id under which reward, group and length of a sample are found."""
        return self.episode_of.get(sample, sample)

    def has_reward(self, sample: int) -> bool:
        """Return whether the reward of a sample did not fail."""
        return not math.isnan(self.rewards[self.episode(sample)])


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceColumn:
    """The expected values of one column on one sample's tokens, with the size of the rounding error to
    allow."""

    values: Sequence[float]
    """[n], one per response token."""
    magnitudes: Sequence[float]
    """[n], the size of the numbers that each value is a sum of: in fp32 it may be wrong by this times the
    rounding of a few operations."""

    @staticmethod
    def constant(num_tokens: int, value: float = 0.0, magnitude: float = 0.0) -> ReferenceColumn:
        """Return the column of a sample whose tokens all have one value; 0 for a sample that teaches nothing."""
        return ReferenceColumn(values=[value] * num_tokens, magnitudes=[magnitude] * num_tokens)

    def times(self, factor: float) -> ReferenceColumn:
        """Return the column multiplied by a number."""
        return ReferenceColumn(
            values=[factor * value for value in self.values],
            magnitudes=[abs(factor) * size for size in self.magnitudes],
        )

    def plus(self, other: ReferenceColumn, factor: float = 1.0) -> ReferenceColumn:
        """Return this column plus `factor` times another one of the same sample."""
        added = other.times(factor)
        return ReferenceColumn(
            values=[sum(pair) for pair in zip(self.values, added.values, strict=True)],
            magnitudes=[sum(pair) for pair in zip(self.magnitudes, added.magnitudes, strict=True)],
        )
