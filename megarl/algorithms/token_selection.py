"""Select the tokens whose update moves the policy's entropy most, by the covariance of log-prob and advantage
(arXiv:2505.22617, section 4), for --policy-loss clip-cov and kl-cov.

    cov(t) = (log pi_old(t) - mean of log pi_old) (A(t) - mean of A)      means over all N tokens of the step

    kl-cov     the --cov-share N tokens with the largest cov
    clip-cov   --cov-share N tokens at random, of those with --cov-low < cov < --cov-high

at least one token each. The log-probs are those of before the step, so the selection is a column that is
computed once, over the step's tokens on all ranks, whatever their split. A token's random number is a hash of
its sample and position: it does not depend on the split either, and a resumed run draws the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algorithms.base import AdvantageInputs

_DIGIT_BITS, _NUM_DIGITS = 16, 4  # of a key of 64 bits


class SelectionFlags(Protocol):
    """The fields of an algorithm that decide which tokens clip-cov and kl-cov select."""

    cov_share: float
    cov_low: float
    cov_high: float


def largest_covariance(flags: SelectionFlags, cov: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens are eligible and their sort keys, for kl-cov: all tokens, ordered by covariance."""
    import torch

    bits = cov.float().view(torch.int32).long()
    ordered = torch.where(bits < 0, ~bits, bits | 0x80000000) & 0xFFFFFFFF  # as floats are ordered
    return torch.ones_like(cov, dtype=torch.bool), (ordered << 32) + draws


def drawn_within_bounds(flags: SelectionFlags, cov: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens are eligible and their sort keys, for clip-cov: those with a covariance within the
    bounds, in random order."""
    return (cov > flags.cov_low) & (cov < flags.cov_high), draws << 32


Choose = Callable[[SelectionFlags, "Tensor", "Tensor"], tuple["Tensor", "Tensor"]]
"""(flags, [N] covariances, [N] random numbers below 2^32) -> ([N] bool, eligible; [N] int64 keys, as 64 bits
without a
sign: of the eligible tokens those with the largest are taken)."""


def select_tokens(
    flags: SelectionFlags, choose: Choose, inputs: AdvantageInputs, advantages: Tensor
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the column selected_tokens, 1 or 0 for each of this rank's tokens, and this rank's part of the
    metrics. Five sums over ranks, of 65,536 numbers at most.

    Metrics: covariance/mean, and covariance/selected, the number of tokens.
    """
    import torch

    is_scored = inputs.spread(~inputs.rewards.isnan())
    log_probs, values = inputs.old_log_probs.double(), advantages.double()
    here = torch.stack([is_scored.sum(), log_probs[is_scored].sum(), values[is_scored].sum()]).double()
    count, log_prob_sum, advantage_sum = inputs.sum_over_ranks(here).tolist()
    count = max(count, 1.0)
    cov = (log_probs - log_prob_sum / count) * (values - advantage_sum / count)
    is_eligible, keys = choose(flags, cov, _draws(inputs))
    is_eligible = is_eligible & is_scored
    selected = torch.zeros_like(is_scored)
    wanted = max(int(flags.cov_share * count), 1)
    selected[is_eligible] = take_largest(keys[is_eligible], wanted, inputs.sum_over_ranks)
    metrics = {
        "covariance/mean": cov[is_scored].sum().item() / count,
        "covariance/selected": float(selected.sum()),
    }
    return {"selected_tokens": selected.float()}, metrics


def take_largest(keys: Tensor, count: int, sum_over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """Return [n] bool: whether each key of this rank is among the `count` largest of all ranks. Equal keys
    are taken together, so there may be more; of 64 bits with 32 random ones that is rare.

    Args:
        keys: [n] int64, whose 64 bits are compared without a sign."""
    import torch

    taken, open_ = torch.zeros_like(keys, dtype=torch.bool), torch.ones_like(keys, dtype=torch.bool)
    for digit in reversed(range(_NUM_DIGITS)):
        digits = (keys >> (digit * _DIGIT_BITS)) & ((1 << _DIGIT_BITS) - 1)
        # How many keys of all ranks have each value of this digit, of those that agree in the digits before.
        counts = sum_over_ranks(torch.bincount(digits[open_], minlength=1 << _DIGIT_BITS).double())
        above = counts.flip(0).cumsum(0).flip(0)  # that many have this value or a larger one
        if above[0] <= count:
            return taken | open_
        limit = int((above > count).sum()) - 1  # the largest value with more than `count` keys from it on
        taken |= open_ & (digits > limit)
        count -= int(above[limit + 1]) if limit + 1 < len(above) else 0
        open_ = open_ & (digits == limit)
        if count == 0:
            return taken
    return taken | open_


def _draws(inputs: AdvantageInputs) -> Tensor:
    """Return [N] int64, a random number below 2^32 for each token, from its sample and its position in the
    response."""
    import torch

    lengths = inputs.response_lengths
    starts = lengths.cumsum(0) - lengths
    position = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
    # A sample is known by its group and its place in it.
    _, group, counts = inputs.group_ids.unique(return_inverse=True, return_counts=True)
    order = group.argsort(stable=True)
    place = torch.empty_like(group)
    place[order] = torch.arange(len(group)) - (counts.cumsum(0) - counts)[group[order]]
    here = _mixed(_mixed(inputs.group_ids) + place)[inputs.rows]
    if inputs.branches is not None:
        here = torch.where(inputs.branches == 0, here, _mixed(here + inputs.branches))
    return (_mixed(here.repeat_interleave(lengths) + position) >> 32) & 0xFFFFFFFF


def _mixed(values: Tensor) -> Tensor:
    """Return the finalizer of SplitMix64 of [n] int64 values: every bit of a result depends on all bits."""
    values = values + -7046029254386353131  # 0x9E3779B97F4A7C15
    values = (values ^ ((values >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    values = (values ^ ((values >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
    return values ^ ((values >> 31) & 0x1FFFFFFFF)
