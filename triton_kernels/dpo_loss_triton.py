"""Kernel of dpo_loss.py: one program per pair reads its two sequences, and then knows and writes the gradient
of their tokens.

A program leaves its share of the totals, which partial_sums_triton.py adds up in a fixed order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.kernels.aot import aot_case
from megarl.kernels.partial_sums_triton import reduce_partials
from megarl.kernels.tiles_triton import load

_BLOCK = 1024


@triton.jit
def _sum_log_ratio(log_probs_ptr, ref_log_probs_ptr, mask_ptr, begin, end, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        exists = tl.load(mask_ptr + i, mask=i < end, other=0) != 0
        log_prob = load(log_probs_ptr, i, exists)
        total += (log_prob - load(ref_log_probs_ptr, i, exists)).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def _write_gradient(gradient_ptr, mask_ptr, begin, end, slope, BLOCK: tl.constexpr):
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        exists = tl.load(mask_ptr + i, mask=i < end, other=0) != 0
        tl.store(gradient_ptr + i, tl.where(exists, slope, 0.0), mask=i < end)


@triton.jit
def _sigmoids(x):
    """Return (log sigmoid(x), sigmoid(x), sigmoid(-x)) of a scalar, without overflow or cancellation."""
    small = tl.exp(-tl.abs(x))
    u = 1.0 + small
    # log(1 + small) to full precision, after W. Kahan: what rounding took from u is made up for by small / (u
    # - 1).
    log1p = tl.where(u == 1.0, small, tl.log(u) * (small / tl.where(u == 1.0, 1.0, u - 1.0)))
    return (
        tl.where(x < 0, x, 0.0) - log1p + 0.0 * x,
        tl.where(x < 0, small, 1.0) / u,
        tl.where(x < 0, 1.0, small) / u,
    )


@triton.jit
def _dpo_loss_kernel(
    log_probs_ptr,
    ref_log_probs_ptr,
    mask_ptr,
    cu_seqlens_ptr,
    weights_ptr,
    gradient_ptr,
    partials_ptr,
    num_pairs,
    beta,
    label_smoothing,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one pair per program. `partials` [4, P] are the loss, then the fields of DPOStats."""
    pair = tl.program_id(0)
    begin = tl.load(cu_seqlens_ptr + 2 * pair).to(tl.int64)
    middle = tl.load(cu_seqlens_ptr + 2 * pair + 1).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + 2 * pair + 2).to(tl.int64)
    weight = tl.load(weights_ptr + pair).to(tl.float32)
    chosen = _sum_log_ratio(log_probs_ptr, ref_log_probs_ptr, mask_ptr, begin, middle, BLOCK)
    rejected = _sum_log_ratio(log_probs_ptr, ref_log_probs_ptr, mask_ptr, middle, end, BLOCK)
    # In fp64: a margin of 1 may be the difference of sums of thousands.
    margin = (chosen - rejected).to(tl.float32)
    if KIND == "ipo":
        error = margin - 1 / (2 * beta)
        loss = error * error
        slope = 2 * error
    else:
        logits = beta * margin
        log_right, right, wrong = _sigmoids(logits)
        log_wrong = log_right - logits
        loss = -(1 - label_smoothing) * log_right - label_smoothing * log_wrong
        slope = beta * (label_smoothing * right - (1 - label_smoothing) * wrong)
    _write_gradient(gradient_ptr, mask_ptr, begin, middle, slope * weight, BLOCK)
    _write_gradient(gradient_ptr, mask_ptr, middle, end, -slope * weight, BLOCK)
    partials_ptr += pair
    tl.store(partials_ptr, loss * weight)
    tl.store(partials_ptr + num_pairs, (margin > 0).to(tl.float32))
    tl.store(partials_ptr + 2 * num_pairs, beta * chosen.to(tl.float32))
    tl.store(partials_ptr + 3 * num_pairs, beta * rejected.to(tl.float32))


def dpo_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    weights: Tensor,
    beta: float,
    label_smoothing: float,
    kind: str,
) -> tuple[Tensor, ...]:
    """Return (loss, gradient [T], the fields of DPOStats), fp32."""
    columns = [x.contiguous() for x in (log_probs, ref_log_probs, mask, cu_seqlens, weights)]
    gradient = torch.empty_like(columns[0], dtype=torch.float32)
    partials = torch.zeros(4, max(len(weights), 1), dtype=torch.float32, device=log_probs.device)
    if len(weights):
        _dpo_loss_kernel[(len(weights),)](
            *columns, gradient, partials, len(weights), beta, label_smoothing, KIND=kind, BLOCK=_BLOCK
        )
    loss, *stats = reduce_partials(partials)
    return loss, gradient, *stats


_TYPES = {
    "mask_ptr": "*i1",
    "cu_seqlens_ptr": "*i32",
    "num_pairs": "i32",
    "beta": "fp32",
    "label_smoothing": "fp32",
}
AOT_CASES = [
    aot_case(
        _dpo_loss_kernel,
        dict(KIND=kind, BLOCK=_BLOCK),
        _TYPES,
        variant=kind,
        num_elements=2 * _BLOCK,  # a block of the chosen sequence and one of the rejected sequence
    )
    for kind in ("sigmoid", "ipo")
]
