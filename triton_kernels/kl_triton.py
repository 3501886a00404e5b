"""Kernel of kl.py, and the functions on tiles that it shares with the policy loss."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.kernels.aot import aot_case
from megarl.kernels.limits import MAX_EXPONENT, MAX_K3
from megarl.kernels.tiles_triton import limit, load

_MAX_K3, _MAX_EXPONENT = tl.constexpr(MAX_K3), tl.constexpr(MAX_EXPONENT)
_BLOCK = 1024


@triton.jit
def exp_minus_1_minus_x(x):
    """Return (exp(x) - 1 - x, exp(x) - 1) to a few units in the last place: exp loses all digits where x
    is small, and there is no expm1. For |x| < 1/2 the first is x^2 times the sum of x^n / (n + 2)!, of
    which 8 terms leave 2e-9 of it."""
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
        raw, negative_slope = exp_minus_1_minus_x(-limit(d, -_MAX_EXPONENT, _MAX_EXPONENT))
        value = tl.where(raw > _MAX_K3, _MAX_K3, raw)
        slope = tl.where(raw > _MAX_K3, 0.0, -negative_slope)
    if STRAIGHT_THROUGH:
        slope = d
    return value, slope


@triton.jit
def _kl_kernel(
    log_probs_ptr,
    ref_log_probs_ptr,
    value_ptr,
    slope_ptr,
    num_tokens,
    KIND: tl.constexpr,
    STRAIGHT_THROUGH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_range = i < num_tokens
    log_prob = load(log_probs_ptr, i, in_range)
    ref = load(ref_log_probs_ptr, i, in_range)
    value, slope = kl_and_slope_tile(log_prob - ref, KIND, STRAIGHT_THROUGH)
    tl.store(value_ptr + i, value, mask=in_range)
    tl.store(slope_ptr + i, slope, mask=in_range)


def kl_and_slope(
    log_probs: Tensor, ref_log_probs: Tensor, kind: str, straight_through: bool
) -> tuple[Tensor, Tensor]:
    """Return the KL estimate of each token and its derivative, fp32."""
    log_probs, ref_log_probs = log_probs.contiguous(), ref_log_probs.contiguous()
    value, slope = (torch.empty_like(log_probs, dtype=torch.float32) for _ in range(2))
    num_tokens = log_probs.numel()
    if num_tokens:
        _kl_kernel[(triton.cdiv(num_tokens, _BLOCK),)](
            log_probs,
            ref_log_probs,
            value,
            slope,
            num_tokens,
            KIND=kind,
            STRAIGHT_THROUGH=straight_through,
            BLOCK=_BLOCK,
        )
    return value, slope


AOT_CASES = [
    aot_case(
        _kl_kernel,
        dict(KIND="k3", STRAIGHT_THROUGH=False, BLOCK=_BLOCK),
        {"num_tokens": "i32"},
        variant="k3",
    )
]
