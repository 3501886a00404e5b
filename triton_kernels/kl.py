"""Per-token estimates of KL(policy || reference) from tokens that the policy sampled (Schulman, joschu.net/blog/kl-approx.html).

With d = log_probs - ref_log_probs:

    k1 = d                     unbiased, but noisy and of either sign
    k2 = d^2 / 2               biased, small variance, >= 0
    k3 = exp(-d) - 1 + d       unbiased, small variance, >= 0

What they do as a *loss* is another question: a good estimate of a value need not have a good gradient (arXiv:2510.01555). For
tokens sampled from the policy that is differentiated:

    k1  gradient 1, so its expectation is 0: noise that pulls the policy nowhere. Right in the reward, useless in a loss.
    k2  gradient d: unbiased for the gradient of KL(policy || reference), the same as k1 in the reward.
    k3  gradient 1 - exp(-d): of KL(reference || policy); equal to k2's to first order in d, unbounded for d << 0.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

KLEstimator = Literal["k1", "k2", "k3"]

# k3 grows as exp(-d): beyond d = -20 (5e8) it stays there, without gradient.
_MAX_EXPONENT = 20.0


def kl_estimate_ref(log_probs: Tensor, ref_log_probs: Tensor, kind: KLEstimator) -> Tensor:
    """The specification, in fp64 and differentiated by autograd."""
    d = log_probs.double() - ref_log_probs.double()
    limited = d.clamp(min=-_MAX_EXPONENT)
    return {"k1": d, "k2": d.square() / 2, "k3": torch.expm1(-limited) + limited}[kind]


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: KLEstimator) -> Tensor:
    """KL estimate per token [N] from log_probs [N] and ref_log_probs [N], fp32. Differentiable in `log_probs` only.

    Raises: ValueError for an unknown kind, different shapes, or a ref_log_probs that requires a gradient.
    """
    if kind not in get_args(KLEstimator):
        raise ValueError(f"kind ({kind!r}) must be one of {', '.join(get_args(KLEstimator))}")
    if log_probs.shape != ref_log_probs.shape:
        raise ValueError(f"ref_log_probs must be {list(log_probs.shape)} like log_probs, got {list(ref_log_probs.shape)}")
    if ref_log_probs.requires_grad:
        raise ValueError("ref_log_probs requires a gradient, but the estimate has none for it: pass ref_log_probs.detach()")
    if kind == "k3":
        return _K3.apply(log_probs, ref_log_probs)
    d = log_probs - ref_log_probs
    return d if kind == "k1" else d.square() / 2


class _K3(torch.autograd.Function):
    """By hand because autograd's derivative of exp(-d) + d loses all digits where d is small: on every early step."""

    @staticmethod
    def forward(ctx, log_probs, ref_log_probs):
        d = log_probs - ref_log_probs
        limited = d.clamp(min=-_MAX_EXPONENT)
        negative_slope = torch.expm1(-limited)
        ctx.save_for_backward(torch.where(d < -_MAX_EXPONENT, 0, -negative_slope))
        return negative_slope + limited

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (slope,) = ctx.saved_tensors
        return grad * slope, None
