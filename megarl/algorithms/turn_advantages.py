"""Compute one advantage per answer of an episode from the rewards of its single answers (--turn-rewards).

An episode i of a group has T_i answers with the rewards r(i, 1) .. r(i, T_i). The return of an answer is what
the episode earns from it on, without a discount:

    G(i, k) = r(i, k) + r(i, k + 1) + ... + r(i, T_i)
    mean    = sum over i of  (1 / T_i) sum over k of G(i, k)             / n
    var     = sum over i of  (1 / T_i) sum over k of (G(i, k) - mean)^2  / (n - 1)
    A(i, k) = (G(i, k) - mean) / (sqrt(var) + 1e-4)

n is the number of episodes of the group with a reward. Each episode counts once, however many answers it has.
So if only the last answers earn something, or every episode has one answer, these are GRPO's advantages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megarl.algorithms.base import AdvantageInputs, ReferenceColumn, ReferenceInputs

if TYPE_CHECKING:
    from torch import Tensor

_EPS = 1e-4
"""As in megarl.kernels.group_advantages."""


def turn_advantages(inputs: AdvantageInputs, normalize_by_std: bool) -> Tensor:
    """Return the [N] fp32 advantages of this rank's tokens; 0 where the reward failed."""
    import torch

    assert inputs.turns is not None
    counts = torch.tensor([1 if turns is None else len(turns.rewards) for turns in inputs.turns])
    returns = [[0.0] if turns is None else turns.returns for turns in inputs.turns]
    episode = torch.arange(len(counts)).repeat_interleave(counts)
    # Rounded to fp32 as rewards are, so that sums of equal ones are exact in fp64.
    values = torch.tensor([value for of_one in returns for value in of_one]).double()
    is_valid = ~inputs.rewards.isnan()
    ids, group = inputs.group_ids.unique(return_inverse=True)

    def sum_of_groups(per_turn: Tensor) -> Tensor:
        """Return, for each group, the sum over its valid episodes of the mean over their answers."""
        of_episodes = torch.zeros(len(counts), dtype=torch.float64).index_add(0, episode, per_turn) / counts
        of_episodes = torch.where(is_valid, of_episodes, 0.0)
        return torch.zeros(len(ids), dtype=torch.float64).index_add(0, group, of_episodes)

    num_valid = sum_of_groups(torch.ones(len(values), dtype=torch.float64))
    of_turn = group[episode]
    mean = sum_of_groups(values) / num_valid.clamp(min=1)
    centered = torch.where(is_valid[episode] & (num_valid > 1)[of_turn], values - mean[of_turn], 0.0)
    if normalize_by_std:
        variance = sum_of_groups(centered.square()) / (num_valid - 1).clamp(min=1)
        centered = centered / (variance.sqrt() + _EPS)[of_turn]
    parts = centered.float().split(counts.tolist())
    empty, found = torch.zeros(0), []
    for row, length in zip(inputs.rows.tolist(), inputs.response_lengths.tolist(), strict=True):
        turns = inputs.turns[row]
        lengths = torch.tensor([length] if turns is None else turns.lengths)
        found.append(parts[row].repeat_interleave(lengths))
    return torch.cat([empty, *found])


def reference_turn_advantages(
    inputs: ReferenceInputs, sample: int, normalize_by_std: bool
) -> dict[str, ReferenceColumn]:
    """Return the advantages of one sample's tokens by plain arithmetic."""
    mine = inputs.turns.get(sample)
    members = [inputs.turns[one] for one in inputs.groups[sample] if inputs.turns.get(one) is not None]
    if mine is None or len(members) == 1:
        return {"advantages": ReferenceColumn.constant(len(inputs.columns(sample, "advantages")))}
    means = [math.fsum(turns.returns) / len(turns.returns) for turns in members]
    mean, scale = math.fsum(means) / len(members), 1.0
    if normalize_by_std:
        squares = [
            math.fsum((value - mean) ** 2 for value in turns.returns) / len(turns.returns)
            for turns in members
        ]
        scale = math.sqrt(math.fsum(squares) / (len(members) - 1)) + _EPS
    largest = max(abs(value) for turns in members for value in turns.returns)
    values: list[float] = []
    for value, length in zip(mine.returns, mine.lengths, strict=True):
        values += [(value - mean) / scale] * length
    # Returns are rounded to fp32, which moves each deviation, and what it is divided by.
    sizes = [largest / scale * (1 + abs(value)) + abs(value) for value in values]
    return {"advantages": ReferenceColumn(values=values, magnitudes=sizes)}
