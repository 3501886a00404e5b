"""Compute the policy loss of a ratio transform that has no kernel, by autograd."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megarl.algorithms.ratio_transforms import Formula, Tokens, TransformFlags

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algorithms.base import LossInputs
    from megarl.kernels.policy_loss import PolicyLossColumns, PolicyLossOptions, PolicyLossStats


def transformed_loss(
    formula: Formula,
    flags: TransformFlags,
    columns: PolicyLossColumns,
    options: PolicyLossOptions,
    inputs: LossInputs,
) -> tuple[Tensor, PolicyLossStats]:
    """Return the sum of the weighted losses of N tokens with KL and entropy terms, and statistics, as
    `policy_loss` does for its kinds. Differentiable in `log_probs` and `entropy` only."""
    import torch

    from megarl.kernels.kl import kl_estimate
    from megarl.kernels.limits import MAX_LOG_RATIO
    from megarl.kernels.policy_loss import PolicyLossStats

    log_ratio = (columns.log_probs - columns.old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    tokens = Tokens(
        log_probs=columns.log_probs,
        log_ratio=log_ratio,
        ratio=log_ratio.exp(),
        advantages=columns.advantages,
        rollout_log_probs=columns.rollout_log_probs,
        selected=inputs.selected_tokens,
        response_mean=lambda values: response_mean(values, inputs.sequence_ids),
    )
    losses, is_held = formula(tokens, flags)
    weights, tis_weight_sum, ref_kl_sum = columns.weights, None, None
    if options.tis_clip is not None:
        log_w = (columns.old_log_probs - columns.rollout_log_probs).clamp(max=math.log(options.tis_clip))
        weights, tis_weight_sum = weights * log_w.exp(), log_w.exp().sum()
    if inputs.correction_weights is not None:
        weights = weights * inputs.correction_weights
    total = (losses * weights).sum()
    if columns.ref_log_probs is not None:
        how = options.kl_estimator, options.kl_straight_through
        kl = kl_estimate(columns.log_probs, columns.ref_log_probs, *how)
        ref_kl_sum = kl.detach().sum()
        if options.kl_coef != 0:
            total = total + options.kl_coef * (columns.weights * kl).sum()
    if options.entropy_coef != 0:
        total = total - options.entropy_coef * (columns.weights * columns.entropy).sum()
    moved = log_ratio.detach()
    zero = moved.new_zeros(())
    return total, PolicyLossStats(
        num_clipped=zero if is_held is None else (is_held & (weights != 0)).sum().to(moved.dtype),
        num_dual_clipped=None,
        kl_sum=(torch.expm1(moved) - moved).sum(),
        ref_kl_sum=ref_kl_sum,
        tis_weight_sum=tis_weight_sum,
        entropy_sum=columns.entropy.detach().sum(),
        ratio_deviation_max=(moved.exp() - 1).abs().max() if len(moved) else zero,
    )


def response_mean(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """Return, for each of N tokens, the mean of the values over the sample that the token is in. Each
    sample must be complete and contiguous."""
    import torch

    if len(values) == 0:
        return values
    index, counts = sequence_ids.unique_consecutive(return_inverse=True, return_counts=True)[1:]
    sums = torch.segment_reduce(values.double(), "sum", lengths=counts)
    return (sums[index] / counts[index]).to(values.dtype)
