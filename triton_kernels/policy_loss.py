"""PPO's clipped policy loss with the two bounds apart, and the dual clip, in one pass that also leaves the gradient.

    ratio = exp(log_probs - old_log_probs)
    loss  = max(-A ratio, -A clip(ratio, 1 - clip_eps_low, 1 + clip_eps_high))    PPO arXiv:1707.06347, eq. 7; DAPO arXiv:2503.14476
    loss  = min(loss, -A clip_ratio_c)     where A < 0: dual clip, arXiv:1912.09729
    total = sum_i weights_i loss_i

The gradient to a log-prob is -A ratio weight where neither clip holds the loss, else 0. log_probs - old_log_probs is limited to
+-20 (a ratio of 5e8), with gradient 0 beyond. Everything is known in the forward pass, so the only tensor that is kept is the
gradient: 4 bytes per token, against some forty for PyTorch's graph of the same formula.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_MAX_LOG_RATIO = 20.0


class PolicyLossStats(NamedTuple):
    """Scalars over the N tokens, not divided by anything, without gradient."""

    num_clipped: Tensor
    """Tokens whose loss is the clipped one: the clip took their gradient away."""
    num_dual_clipped: Tensor
    """Tokens with a negative advantage whose loss is the dual clip's bound."""
    kl_sum: Tensor
    """Sum of ratio - 1 - log ratio: the k3 estimate of KL(old || now), for tokens sampled from old."""
    ratio_deviation_max: Tensor
    """Largest |ratio - 1|; 0 for no tokens."""


def policy_loss_ref(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    clip_ratio_c: float | None = None,
) -> Tensor:
    """The specification of the loss, in fp64 and differentiated by autograd."""
    log_probs, old_log_probs, advantages, weights = (x.double() for x in (log_probs, old_log_probs, advantages, weights))
    ratio = (log_probs - old_log_probs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high))
    if clip_ratio_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * clip_ratio_c), loss)
    return (weights * loss).sum()


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    clip_ratio_c: float | None = None,
) -> tuple[Tensor, PolicyLossStats]:
    """Sum of the weighted, clipped policy loss of N tokens. Differentiable in `log_probs` only.

    Args:
        log_probs: [N] fp32, of the policy now.
        old_log_probs, advantages: [N] fp32, constants.
        weights: [N] fp32, constants: a token's share of the mean over the whole mini-batch (`token_weights`), times any
            importance weight of the caller. The loss is summed, never divided.
        clip_eps_low, clip_eps_high: the ratio is clipped to [1 - clip_eps_low, 1 + clip_eps_high].
        clip_ratio_c: bound of the ratio for negative advantages, > 1. None: no dual clip.

    Returns: the loss, a scalar, and `PolicyLossStats`. N may be 0: all zeros, with a gradient of shape [0].
    Raises: ValueError if shapes differ, or if anything but log_probs requires a gradient.
    """
    constants = {"old_log_probs": old_log_probs, "advantages": advantages, "weights": weights}
    for name, tensor in constants.items():
        if tensor.shape != log_probs.shape or log_probs.ndim != 1:
            raise ValueError(f"{name} must be [N] like log_probs, got {list(tensor.shape)} with log_probs {list(log_probs.shape)}")
        if tensor.requires_grad:
            raise ValueError(f"{name} requires a gradient, but the loss has none for it: pass {name}.detach()")
    loss, *stats = _PolicyLoss.apply(log_probs, old_log_probs, advantages, weights, clip_eps_low, clip_eps_high, clip_ratio_c)
    return loss, PolicyLossStats(*stats)


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_probs, old_log_probs, advantages, weights, clip_eps_low, clip_eps_high, clip_ratio_c):
        difference = log_probs - old_log_probs
        log_ratio = difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        ratio = torch.exp(log_ratio)
        loss = -advantages * ratio
        clipped_loss = -advantages * ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high)
        is_clipped = clipped_loss > loss
        gradient = torch.where(is_clipped | (difference.abs() > _MAX_LOG_RATIO), 0, loss * weights)
        loss = torch.maximum(loss, clipped_loss)
        num_dual_clipped = loss.new_zeros(())
        if clip_ratio_c is not None:
            bound = -advantages * clip_ratio_c
            is_dual_clipped = (advantages < 0) & (loss > bound)
            loss = torch.where(is_dual_clipped, bound, loss)
            gradient = torch.where(is_dual_clipped, 0, gradient)
            num_dual_clipped = is_dual_clipped.sum().to(loss.dtype)
        ctx.save_for_backward(gradient)
        num_clipped = is_clipped.sum().to(loss.dtype)
        kl_sum = (torch.expm1(log_ratio) - log_ratio).sum()
        ratio_deviation_max = (ratio - 1).abs().max() if len(ratio) else loss.new_zeros(())
        ctx.mark_non_differentiable(num_clipped, num_dual_clipped, kl_sum, ratio_deviation_max)
        return (loss * weights).sum(), num_clipped, num_dual_clipped, kl_sum, ratio_deviation_max

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, *_):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss, None, None, None, None, None, None
