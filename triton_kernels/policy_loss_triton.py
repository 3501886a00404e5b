"""Kernel of policy_loss.py: loss, gradient and statistics of a block of tokens in one program.

A program leaves partial sums, which partial_sums_triton.py adds up in a fixed order. Options that are off are
not compiled in."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.kernels.aot import aot_case
from megarl.kernels.kl_triton import exp_minus_1_minus_x, kl_and_slope_tile
from megarl.kernels.limits import MAX_LOG_RATIO
from megarl.kernels.partial_sums_triton import reduce_partials
from megarl.kernels.tiles_triton import limit, load

_MAX_LOG_RATIO = tl.constexpr(MAX_LOG_RATIO)
# A block of 1024 spills on sm_90.
_BLOCK = 512


@triton.jit
def _policy_loss_kernel(
    log_probs_ptr,
    old_log_probs_ptr,
    advantages_ptr,
    weights_ptr,
    rollout_log_probs_ptr,
    ref_log_probs_ptr,
    entropy_ptr,
    gradient_ptr,
    partials_ptr,
    num_tokens,
    clip_low,
    clip_high,
    clip_ratio_c,
    max_log_tis,
    kl_coef,
    entropy_coef,
    KIND: tl.constexpr,
    KL_ESTIMATOR: tl.constexpr,
    KL_STRAIGHT_THROUGH: tl.constexpr,
    HAS_DUAL_CLIP: tl.constexpr,
    HAS_TIS: tl.constexpr,
    HAS_REF: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_KL_LOSS: tl.constexpr,
    HAS_ENTROPY_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one block of tokens per program. The partial sums [8, blocks] are the loss, then the fields of
    PolicyLossStats.

    Comparisons and `where` replace tl.maximum, so that NaN stays NaN."""
    block = tl.program_id(0)
    i = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_range = i < num_tokens
    weight = load(weights_ptr, i, in_range)
    exists = weight != 0
    log_prob = load(log_probs_ptr, i, exists)
    old = load(old_log_probs_ptr, i, exists)
    advantage = load(advantages_ptr, i, exists)

    difference = log_prob - old
    log_ratio = limit(difference, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = tl.exp(log_ratio)
    clipped_ratio = limit(ratio, clip_low, clip_high)
    if KIND == "cispo":
        is_clipped = clipped_ratio != ratio
        slope = -advantage * clipped_ratio
        loss = slope * log_prob
    else:
        loss = -advantage * ratio
        clipped_loss = -advantage * clipped_ratio
        is_clipped = clipped_loss > loss
        slope = tl.where(is_clipped | (tl.abs(difference) > _MAX_LOG_RATIO), 0.0, loss)
        loss = tl.where(is_clipped, clipped_loss, loss)
    is_dual_clipped = exists & False
    if HAS_DUAL_CLIP:
        bound = -advantage * clip_ratio_c
        is_dual_clipped = (advantage < 0) & (loss > bound)
        loss = tl.where(is_dual_clipped, bound, loss)
        slope = tl.where(is_dual_clipped, 0.0, slope)
    tis = tl.zeros_like(weight)
    policy_weight = weight
    if HAS_TIS:
        tis_difference = old - load(rollout_log_probs_ptr, i, exists)
        tis = tl.where(
            exists, tl.exp(tl.where(tis_difference > max_log_tis, max_log_tis, tis_difference)), 0.0
        )
        policy_weight = weight * tis
    total, gradient = loss * policy_weight, slope * policy_weight
    kl = tl.zeros_like(weight)
    if HAS_REF:
        ref = load(ref_log_probs_ptr, i, exists)
        kl, kl_slope = kl_and_slope_tile(log_prob - ref, KL_ESTIMATOR, KL_STRAIGHT_THROUGH)
        if HAS_KL_LOSS:
            total += kl_coef * (weight * kl)
            gradient += kl_coef * (weight * kl_slope)
    entropy = tl.zeros_like(weight)
    if HAS_ENTROPY:
        entropy = load(entropy_ptr, i, exists)
        if HAS_ENTROPY_LOSS:
            total -= entropy_coef * (weight * entropy)
    tl.store(gradient_ptr + i, gradient, mask=in_range)

    old_kl, _ = exp_minus_1_minus_x(log_ratio)
    deviation = tl.abs(ratio - 1.0)
    blocks = tl.num_programs(0)
    partials_ptr += block
    tl.store(partials_ptr, tl.sum(total))
    tl.store(partials_ptr + blocks, tl.sum(is_clipped.to(tl.float32)))
    tl.store(partials_ptr + 2 * blocks, tl.sum(is_dual_clipped.to(tl.float32)))
    tl.store(partials_ptr + 3 * blocks, tl.sum(old_kl))
    tl.store(partials_ptr + 4 * blocks, tl.sum(kl))
    tl.store(partials_ptr + 5 * blocks, tl.sum(tis))
    tl.store(partials_ptr + 6 * blocks, tl.sum(entropy))
    # tl.max leaves out NaN: the sum brings it back.
    tl.store(partials_ptr + 7 * blocks, tl.max(deviation, 0) + 0.0 * tl.sum(deviation))


def policy_loss(columns: Sequence[Tensor | None], options: Any) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return (loss, gradient [N], the fields of PolicyLossStats), fp32.

    Args:
        columns, options: PolicyLossColumns and PolicyLossOptions of policy_loss.py."""
    columns = [None if x is None else x.contiguous() for x in columns]
    num_tokens, has_ref, has_entropy = len(columns[0]), columns[5] is not None, columns[6] is not None
    has_tis = options.tis_clip is not None
    gradient = torch.empty_like(columns[0], dtype=torch.float32)
    num_blocks = max(triton.cdiv(num_tokens, _BLOCK), 1)
    partials = torch.empty(8, num_blocks, dtype=torch.float32, device=gradient.device)
    _policy_loss_kernel[(num_blocks,)](
        *columns,
        gradient,
        partials,
        num_tokens,
        1 - options.clip_eps_low,
        1 + options.clip_eps_high,
        options.clip_ratio_c or 0.0,
        math.log(options.tis_clip or 1.0),
        options.kl_coef,
        options.entropy_coef,
        KIND=options.kind,
        KL_ESTIMATOR=options.kl_estimator,
        KL_STRAIGHT_THROUGH=options.kl_straight_through,
        HAS_DUAL_CLIP=options.clip_ratio_c is not None,
        HAS_TIS=has_tis,
        HAS_REF=has_ref,
        HAS_ENTROPY=has_entropy,
        HAS_KL_LOSS=options.kl_coef != 0,
        HAS_ENTROPY_LOSS=options.entropy_coef != 0,
        BLOCK=_BLOCK,
    )
    loss, *stats = reduce_partials(partials, max_row=7)
    is_given = (True, True, True, has_ref, has_tis, has_entropy, True)
    return loss, gradient, [total if given else None for total, given in zip(stats, is_given, strict=True)]


_NUMBERS = ("clip_low", "clip_high", "clip_ratio_c", "max_log_tis", "kl_coef", "entropy_coef")
_CONSTANTS = dict(
    KL_ESTIMATOR="k3",
    KL_STRAIGHT_THROUGH=False,
    HAS_TIS=True,
    HAS_REF=True,
    HAS_ENTROPY=True,
    HAS_KL_LOSS=True,
    HAS_ENTROPY_LOSS=True,
    BLOCK=_BLOCK,
)
AOT_CASES = [
    aot_case(
        _policy_loss_kernel,
        _CONSTANTS | dict(KIND=kind, HAS_DUAL_CLIP=kind == "ppo"),
        {"num_tokens": "i32"} | dict.fromkeys(_NUMBERS, "fp32"),
        variant=f"{kind}, all options",
    )
    for kind in ("ppo", "cispo")
]
