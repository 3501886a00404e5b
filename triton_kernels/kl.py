"""Per-token estimates of KL(policy || reference) from tokens that the policy sampled (Schulman, joschu.net/blog/kl-approx.html).

With d = log_probs - ref_log_probs:

    k1  = d                    unbiased, but noisy and of either sign
    abs = |d|                  biased: a distance, not an estimate of the KL
    k2  = d^2 / 2              biased, small variance, >= 0
    k3  = exp(-d) - 1 + d      unbiased, small variance, >= 0; held at 10, without gradient, where it would be more

What they do as a *loss* is another question: a good estimate of a value need not have a good gradient (arXiv:2510.01555). For
tokens sampled from the policy that is differentiated:

    k1  gradient 1, so its expectation is 0: noise that pulls the policy nowhere. Right in the reward, useless in a loss.
    abs gradient of size 1 towards the reference, however near it is.
    k2  gradient d: unbiased for the gradient of KL(policy || reference), the same as k1 in the reward.
    k3  gradient 1 - exp(-d): of KL(reference || policy); equal to k2's to first order in d.

`straight_through` shows the value of any of them and has the gradient of k2, unlimited.

The limit of k3 is verl's: it is met where the policy's probability fell below 1/13 of the reference's, or is e^11 times as large.
One launch reads 8 and writes 8 bytes per token: the estimate, and its slope for the backward.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.kernels.backend import backend_of

KLEstimator = Literal["k1", "abs", "k2", "k3"]

_MAX_K3 = 10.0
# exp(-d) must not overflow; a d this far from 0 is beyond _MAX_K3 on both sides.
_MAX_EXPONENT = 20.0
_MAX_K3_CONSTEXPR, _MAX_EXPONENT_CONSTEXPR = tl.constexpr(_MAX_K3), tl.constexpr(_MAX_EXPONENT)
_BLOCK = 1024


def kl_estimate_ref(log_probs: Tensor, ref_log_probs: Tensor, kind: KLEstimator, straight_through: bool = False) -> Tensor:
    """The specification, in fp64 and differentiated by autograd."""
    d = log_probs.double() - ref_log_probs.double()
    limited = d.clamp(-_MAX_EXPONENT, _MAX_EXPONENT)
    k3 = (torch.expm1(-limited) + limited).clamp(max=_MAX_K3)
    value = {"k1": d, "abs": d.abs(), "k2": d.square() / 2, "k3": k3}[kind]
    k2 = d.square() / 2
    return value.detach() + k2 - k2.detach() if straight_through else value


def at_least_fp32(x: Tensor | None) -> Tensor | None:
    """fp64 stays, for gradient checks; all else is computed in fp32, as the kernels do."""
    return None if x is None else x.to(torch.promote_types(x.dtype, torch.float32))


def kl_and_slope(d: Tensor, kind: KLEstimator, straight_through: bool) -> tuple[Tensor, Tensor]:
    """Estimate and derivative for differences d [N], by hand: autograd's derivative of exp(-d) + d loses all digits where d is
    small, on every early step."""
    match kind:
        case "k1":
            value, slope = d, torch.ones_like(d)
        case "abs":
            value, slope = d.abs(), torch.where(d.isnan(), d, d.sign())
        case "k2":
            value, slope = d.square() / 2, d
        case _:
            limited = d.clamp(-_MAX_EXPONENT, _MAX_EXPONENT)
            negative_slope = torch.expm1(-limited)
            value = negative_slope + limited
            slope = torch.where(value > _MAX_K3, 0, -negative_slope)
            value = value.clamp(max=_MAX_K3)
    return value, d if straight_through else slope


@triton.jit
def exp_minus_1_minus_x(x):
    """(exp(x) - 1 - x, exp(x) - 1) to a few units in the last place: exp loses all digits where x is small, and there is no expm1.
    For |x| < 1/2 the first is x^2 times the sum of x^n / (n + 2)!, of which 8 terms leave 2e-9 of it."""
    near = tl.abs(x) < 0.5
    y = tl.where(near, x, 0.0)
    series = y * 2.7557319223985893e-06 + 2.48015873015873e-05
    series = series * y + 1.984126984126984e-04
    series = series * y + 1.388888888888889e-03
    series = series * y + 8.333333333333333e-03
    series = series * y + 4.1666666666666664e-02
    series = series * y + 1.6666666666666666e-01
    series = (series * y + 0.5) * y * y
    far = tl.exp(x) - 1.0
    return tl.where(near, series, far - x), tl.where(near, series + y, far)


@triton.jit
def limit(x, low, high):
    """NaN stays NaN, unlike with tl.clamp."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def kl_and_slope_tile(d, KIND: tl.constexpr, STRAIGHT_THROUGH: tl.constexpr):
    if KIND == "k1":
        value = d
        slope = tl.zeros_like(d) + 1.0
    elif KIND == "abs":
        value = tl.abs(d)
        slope = tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, d))
    elif KIND == "k2":
        value = d * d / 2
        slope = d
    else:
        raw, negative_slope = exp_minus_1_minus_x(-limit(d, -_MAX_EXPONENT_CONSTEXPR, _MAX_EXPONENT_CONSTEXPR))
        value = tl.where(raw > _MAX_K3_CONSTEXPR, _MAX_K3_CONSTEXPR, raw)
        slope = tl.where(raw > _MAX_K3_CONSTEXPR, 0.0, -negative_slope)
    if STRAIGHT_THROUGH:
        slope = d
    return value, slope


@triton.jit
def _kl_kernel(
    log_probs_ptr, ref_log_probs_ptr, value_ptr, slope_ptr, num_tokens,
    KIND: tl.constexpr, STRAIGHT_THROUGH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_range = i < num_tokens
    log_prob = tl.load(log_probs_ptr + i, mask=in_range, other=0.0).to(tl.float32)
    ref = tl.load(ref_log_probs_ptr + i, mask=in_range, other=0.0).to(tl.float32)
    value, slope = kl_and_slope_tile(log_prob - ref, KIND, STRAIGHT_THROUGH)
    tl.store(value_ptr + i, value, mask=in_range)
    tl.store(slope_ptr + i, slope, mask=in_range)


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: KLEstimator, straight_through: bool = False) -> Tensor:
    """KL estimate per token [N] from log_probs [N] and ref_log_probs [N], fp32. Differentiable in `log_probs` only.

    Raises: ValueError for an unknown kind, different shapes, or a ref_log_probs that requires a gradient.
    """
    if kind not in get_args(KLEstimator):
        raise ValueError(f"kind ({kind!r}) must be one of {', '.join(get_args(KLEstimator))}")
    if log_probs.shape != ref_log_probs.shape:
        raise ValueError(f"ref_log_probs must be {list(log_probs.shape)} like log_probs, got {list(ref_log_probs.shape)}")
    if ref_log_probs.requires_grad:
        raise ValueError("ref_log_probs requires a gradient, but the estimate has none for it: pass ref_log_probs.detach()")
    return _KLEstimate.apply(log_probs, ref_log_probs, kind, straight_through)


class _KLEstimate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_probs, ref_log_probs, kind, straight_through):
        if backend_of(log_probs) == "torch":
            value, slope = kl_and_slope(at_least_fp32(log_probs) - at_least_fp32(ref_log_probs), kind, straight_through)
        else:
            log_probs, ref_log_probs = log_probs.contiguous(), ref_log_probs.contiguous()
            value, slope = (torch.empty_like(log_probs, dtype=torch.float32) for _ in range(2))
            num_blocks = triton.cdiv(log_probs.numel(), _BLOCK)
            if num_blocks:
                _kl_kernel[(num_blocks,)](
                    log_probs, ref_log_probs, value, slope, log_probs.numel(), KIND=kind, STRAIGHT_THROUGH=straight_through, BLOCK=_BLOCK
                )
        ctx.save_for_backward(slope)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None, None
