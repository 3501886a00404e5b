"""Kernel of group_advantages.py: a program compares its samples with all samples, a tile of [BLOCK,
BLOCK_OTHERS] after another.

Neither a sort nor the number of groups is needed, and so nothing that would have to be read back from the
GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.kernels.aot import NUM_SAMPLES, aot_case

_BLOCK, _BLOCK_OTHERS = 16, 256


@triton.jit
def _others(rewards_ptr, group_ids_ptr, j, num_samples, ids):
    """Return the rewards of samples j [1, J] in fp64, and whether each is valid and in the group of ids."""
    other = tl.load(rewards_ptr + j, mask=j < num_samples, other=float("nan")).to(tl.float64)[None, :]
    other_ids = tl.load(group_ids_ptr + j, mask=j < num_samples, other=0)[None, :]
    return other, (other_ids == ids) & (other == other)


@triton.jit
def _group_advantages_kernel(
    rewards_ptr,
    group_ids_ptr,
    advantages_ptr,
    num_samples,
    eps,
    NORMALIZE_BY_STD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_range = i < num_samples
    ids = tl.load(group_ids_ptr + i, mask=in_range, other=0)[:, None]
    count = tl.zeros([BLOCK, BLOCK_OTHERS], tl.float64)
    total = tl.zeros([BLOCK, BLOCK_OTHERS], tl.float64)
    for start in range(0, num_samples, BLOCK_OTHERS):
        j = start + tl.arange(0, BLOCK_OTHERS)
        other, is_mine = _others(rewards_ptr, group_ids_ptr, j, num_samples, ids)
        count += tl.where(is_mine, 1.0, 0.0)
        total += tl.where(is_mine, other, 0.0)
    count_sum = tl.sum(count, 1)
    # In fp64 a sum of equal fp32 rewards is exact, so that equal rewards give exactly 0.
    mean = tl.sum(total, 1) / tl.where(count_sum > 1, count_sum, 1.0)
    reward = tl.load(rewards_ptr + i, mask=in_range, other=0.0).to(tl.float64)
    advantage = tl.where(reward == reward, reward - mean, 0.0)
    if NORMALIZE_BY_STD:
        squares = tl.zeros([BLOCK, BLOCK_OTHERS], tl.float64)
        for start in range(0, num_samples, BLOCK_OTHERS):
            j = start + tl.arange(0, BLOCK_OTHERS)
            other, is_mine = _others(rewards_ptr, group_ids_ptr, j, num_samples, ids)
            centered = tl.where(is_mine, other - mean[:, None], 0.0)
            squares += centered * centered
        variance = tl.sum(squares, 1) / tl.where(count_sum > 2, count_sum - 1, 1.0)
        advantage = advantage / (tl.sqrt(variance) + eps)
    tl.store(advantages_ptr + i, advantage.to(tl.float32), mask=in_range)


def group_advantages(rewards: Tensor, group_ids: Tensor, normalize_by_std: bool, eps: float) -> Tensor:
    """Return the advantages, [B] fp32."""
    rewards, group_ids = rewards.contiguous(), group_ids.contiguous()
    advantages = torch.empty_like(rewards, dtype=torch.float32)
    if len(rewards):
        _group_advantages_kernel[(triton.cdiv(len(rewards), _BLOCK),)](
            rewards,
            group_ids,
            advantages,
            len(rewards),
            eps,
            NORMALIZE_BY_STD=normalize_by_std,
            BLOCK=_BLOCK,
            BLOCK_OTHERS=_BLOCK_OTHERS,
        )
    return advantages


AOT_CASES = [
    aot_case(
        _group_advantages_kernel,
        dict(NORMALIZE_BY_STD=True, BLOCK=_BLOCK, BLOCK_OTHERS=_BLOCK_OTHERS),
        {"group_ids_ptr": "*i64", "num_samples": "i32", "eps": "fp32"},
        variant="normalized",
        element="pair of samples",
        num_elements=_BLOCK * _BLOCK_OTHERS,
        bytes_per_element=16 / NUM_SAMPLES,  # the other samples come from a cache
    )
]
