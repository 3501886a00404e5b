"""Kernels of gae.py: the scan, one program per sequence, and the whitening of its result.

Statistics are fp64: a sum of squares in fp32 would lose the variance of advantages whose mean is large."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.kernels.aot import aot_case
from megarl.kernels.limits import WHITEN_EPS
from megarl.kernels.tiles_triton import load

_WHITEN_EPS = tl.constexpr(WHITEN_EPS)
_BLOCK = 1024


@triton.jit
def _then(a1, v1, d1, m1, e1, a2, v2, d2, m2, e2):
    """Compose two maps (A, V) -> (a A + v V + d, m V + e): that of the later tokens first, then that of
    the earlier ones."""
    return a2 * a1, a2 * v1 + v2 * m1, a2 * d1 + v2 * e1 + d2, m2 * m1, m2 * e1 + e2


@triton.jit
def _gae_kernel(
    rewards_ptr,
    values_ptr,
    mask_ptr,
    cu_seqlens_ptr,
    bootstrap_ptr,
    advantages_ptr,
    returns_ptr,
    stats_ptr,
    decay_ptr,
    gamma,
    BLOCK: tl.constexpr,
):
    """Scan one sequence per program, a tile after another from its end. `stats` is [B, 3] fp64."""
    sequence = tl.program_id(0)
    begin = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    advantage = tl.zeros([], tl.float32)
    next_value = tl.load(bootstrap_ptr + sequence).to(tl.float32)
    decay = tl.load(decay_ptr + sequence).to(tl.float32)
    total = tl.zeros([], tl.float64)
    squares = tl.zeros([], tl.float64)
    count = tl.zeros([], tl.float64)
    for last in range(end - 1, begin - 1, -BLOCK):
        t = last - lane
        in_sequence = t >= begin
        is_action = tl.load(mask_ptr + t, mask=in_sequence, other=0) != 0
        reward = load(rewards_ptr, t, is_action)
        value = load(values_ptr, t, is_action)
        # Tokens that are no actions, and lanes before the sequence, are the identity.
        maps = (
            tl.where(is_action, decay, 1.0),
            tl.where(is_action, gamma, 0.0),
            reward - value,
            tl.where(is_action, 0.0, 1.0),
            value,
        )
        a, v, d, m, e = tl.associative_scan(maps, 0, _then)
        advantages = a * advantage + v * next_value + d
        tl.store(advantages_ptr + t, tl.where(is_action, advantages, 0.0), mask=in_sequence)
        tl.store(returns_ptr + t, tl.where(is_action, advantages + value, 0.0), mask=in_sequence)
        exact = tl.where(is_action, advantages, 0.0).to(tl.float64)
        total += tl.sum(exact, 0)
        squares += tl.sum(exact * exact, 0)
        count += tl.sum(is_action.to(tl.float64), 0)
        # The last lane's map is that of the whole tile.
        is_end = lane == BLOCK - 1
        advantage = tl.sum(tl.where(is_end, advantages, 0.0), 0)
        next_value = tl.sum(tl.where(is_end, m * next_value + e, 0.0), 0)
    tl.store(stats_ptr + sequence * 3, total)
    tl.store(stats_ptr + sequence * 3 + 1, squares)
    tl.store(stats_ptr + sequence * 3 + 2, count)


@triton.jit
def _whiten_kernel(advantages_ptr, mask_ptr, stats_ptr, whitened_ptr, num_tokens, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_range = i < num_tokens
    is_action = tl.load(mask_ptr + i, mask=in_range, other=0) != 0
    total, squares, count = tl.load(stats_ptr), tl.load(stats_ptr + 1), tl.load(stats_ptr + 2)
    mean = total / tl.where(count > 1, count, 1.0)
    variance = squares - total * mean
    variance = tl.where(variance < 0, 0.0, variance) / tl.where(count > 2, count - 1, 1.0)
    scale = 1 / tl.sqrt(variance + _WHITEN_EPS)
    advantage = load(advantages_ptr, i, is_action)
    whitened = (advantage - mean.to(tl.float32)) * scale.to(tl.float32)
    tl.store(whitened_ptr + i, tl.where(is_action, whitened, 0.0), mask=in_range)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap_values: Tensor,
    gamma: float,
    decay: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (advantages [T] fp32, returns [T] fp32, statistics [3] fp64). `decay`: [B], gamma times lambda."""
    columns = [x.contiguous() for x in (rewards, values, mask, cu_seqlens, bootstrap_values)]
    advantages, returns = (
        torch.empty(rewards.shape, dtype=torch.float32, device=rewards.device) for _ in range(2)
    )
    stats = torch.empty(len(bootstrap_values), 3, dtype=torch.float64, device=rewards.device)
    if len(stats):
        out = advantages, returns, stats, decay.contiguous()
        _gae_kernel[(len(stats),)](*columns, *out, gamma, BLOCK=_BLOCK)
    return advantages, returns, stats.sum(0)


def whiten(advantages: Tensor, mask: Tensor, stats: Tensor) -> Tensor:
    """Return the whitened advantages, [T] fp32, 0 where the mask is false."""
    advantages, mask = advantages.contiguous(), mask.contiguous()
    whitened = torch.empty_like(advantages, dtype=torch.float32)
    if len(advantages):
        _whiten_kernel[(triton.cdiv(len(advantages), _BLOCK),)](
            advantages, mask, stats, whitened, len(advantages), BLOCK=_BLOCK
        )
    return whitened


_TYPES = {
    "mask_ptr": "*i1",
    "cu_seqlens_ptr": "*i32",
    "stats_ptr": "*fp64",
    "num_tokens": "i32",
    "gamma": "fp32",
}
AOT_CASES = [aot_case(kernel, dict(BLOCK=_BLOCK), _TYPES) for kernel in (_gae_kernel, _whiten_kernel)]
