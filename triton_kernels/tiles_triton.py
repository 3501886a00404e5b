"""Functions on tiles that several kernels share.

Comparisons and `where` in place of tl.maximum, tl.minimum and tl.clamp: those may drop a NaN."""

import triton
import triton.language as tl

from megarl.kernels.aot import AotCase


@triton.jit
def load(pointer, i, mask):
    """Load elements i as fp32, and 0 where the mask is false."""
    return tl.load(pointer + i, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def limit(x, low, high):
    """Limit x to [low, high]. NaN stays NaN, unlike with tl.clamp."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


AOT_CASES: list[AotCase] = []
