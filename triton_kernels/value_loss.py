"""PPO's clipped value loss (of the code of arXiv:1707.06347; arXiv:2005.12729, section 3), its gradient, and
the sums for the explained variance.

    clipped = old_values + clip(values - old_values, -clip_eps, clip_eps)
    loss    = max((values - returns)^2, (clipped - returns)^2) / 2
    total   = sum_i weights_i loss_i

The gradient to a value is (values - returns) weight, or 0 where the clipped term is the larger. A token of
weight 0 does not exist: whatever the other columns hold there. All in one launch: 20 bytes per token; only
the gradient is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.kernels.backend import backend
from megarl.kernels.checks import check_column, check_constants
from megarl.kernels.gradient import with_gradient
from megarl.kernels.kl import at_least_fp32


class ValueLossStats(NamedTuple):
    """Sums, not means, over the tokens whose weight is not 0, without gradient. With n tokens, the explained
    variance is 1 - (error_squares - error_sum^2 / n) / (return_squares - return_sum^2 / n)."""

    num_clipped: Tensor
    """Tokens whose loss is the clipped one, so that they have no gradient."""
    error_sum: Tensor
    """Sum of values - returns."""
    error_squares: Tensor
    return_sum: Tensor
    return_squares: Tensor


def value_loss_ref(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip_eps: float | None
) -> Tensor:
    """Specification of `value_loss` for tests: return the loss of the tokens whose weight is not 0, in fp64
    and differentiated by autograd."""
    values, old_values, returns, weights = (
        x[weights != 0].double() for x in (values, old_values, returns, weights)
    )
    loss = (values - returns).square()
    if clip_eps is not None:
        clipped = old_values + (values - old_values).clamp(-clip_eps, clip_eps)
        loss = torch.maximum(loss, (clipped - returns).square())
    return (weights * loss / 2).sum()


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, clip_eps: float | None
) -> tuple[Tensor, ValueLossStats]:
    """Return the sum of the weighted value losses of N tokens, and `ValueLossStats`. Differentiable in
    `values` only.

    Args:
        values: [N] fp32, of the critic now.
        old_values, returns: [N] fp32, constants: of the critic before the first update, and `GAE.returns`.
        weights: [N] fp32, constants: a token's share of the mean over the whole mini-batch (`token_weights`);
            0 takes a token out.
        clip_eps: how far a value may move from the old one before its gradient ends, > 0. None: plain squared
            error.

    Returns: the loss, a scalar, and `ValueLossStats`. N may be 0.
    Raises: ValueError if shapes differ, a constant requires a gradient, or clip_eps is not positive.
    """
    constants = {"old_values": old_values, "returns": returns, "weights": weights}
    for name, tensor in constants.items():
        check_column(name, tensor, "values", values)
    check_constants(constants)
    if clip_eps is not None and not clip_eps > 0:
        raise ValueError(f"clip_eps ({clip_eps}) must be above 0, e.g. 0.2, or None for no clip")
    loss, *stats = with_gradient(_compute, values, old_values, returns, weights, clip_eps)
    return loss, ValueLossStats(*stats)


def _compute(values, old_values, returns, weights, clip_eps) -> tuple[Tensor, ...]:
    """Return (loss, gradient [N], the fields of ValueLossStats)."""
    if backend(values) == "triton":
        from megarl.kernels import value_loss_triton

        return value_loss_triton.value_loss(values, old_values, returns, weights, clip_eps)
    values, old_values, returns, weights = map(at_least_fp32, (values, old_values, returns, weights))
    exists = weights != 0
    values, old_values, returns = (torch.where(exists, x, 0) for x in (values, old_values, returns))
    error = values - returns
    loss, gradient, num_clipped = error.square(), error, weights.new_zeros(())
    if clip_eps is not None:
        clipped_loss = (old_values + (values - old_values).clamp(-clip_eps, clip_eps) - returns).square()
        # Within the clip both are the same but for rounding, which must not take the gradient away.
        is_clipped = (clipped_loss > loss) & ((values - old_values).abs() > clip_eps)
        loss, gradient = torch.where(is_clipped, clipped_loss, loss), torch.where(is_clipped, 0, gradient)
        num_clipped = is_clipped.sum().to(loss.dtype)
    sums = error.sum(), error.square().sum(), returns.sum(), returns.square().sum()
    return (loss * weights).sum() / 2, gradient * weights, num_clipped, *sums
