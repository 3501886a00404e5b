"""Group-relative advantages (GRPO, arXiv:2402.03300, section 4.1.2; without the division: Dr. GRPO,
arXiv:2503.20783).

    advantages[i] = rewards[i] - mean(group of i)        / (std(group of i) + eps), if normalize_by_std

A group is all samples with the same id, in any order. The standard deviation is the unbiased one, as
`torch.std`. A group with a single reward has nothing to be compared with: advantage 0. Equal rewards give
exactly 0. A NaN reward is a sample whose reward failed: it takes no part in its group's statistics and its
own advantage is 0.

The kernel compares every sample with every other: 2 B^2 fp64 additions in one launch (B = 16384: 5e8, well
below a millisecond), where finding the distinct ids needs a sort and a stop of the stream to learn how many
there are. 16 bytes per sample leave or enter the chip; the rest is read from its caches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.kernels.backend import backend


def group_advantages_ref(
    rewards: Tensor, group_ids: Tensor, normalize_by_std: bool, eps: float = 1e-4
) -> Tensor:
    """Specification of `group_advantages` for tests: return the advantages [B], one group after another, in
    fp64."""
    advantages = torch.zeros_like(rewards, dtype=torch.float64)
    for group_id in group_ids.unique():
        members = (group_ids == group_id) & ~rewards.isnan()
        if members.sum() > 1:
            group = rewards[members].double()
            scale = group.std() + eps if normalize_by_std else 1.0
            advantages[members] = (group - group.mean()) / scale
    return advantages


def group_advantages(rewards: Tensor, group_ids: Tensor, normalize_by_std: bool, eps: float = 1e-4) -> Tensor:
    """Return GRPO's advantage of each sample: its reward minus the mean of its group, and with
    `normalize_by_std` divided by the group's standard deviation + eps.

    Groups must be complete on this rank, because nothing is reduced over ranks.

    Args:
        rewards: [B] of any float dtype, one per sample, taken as fp32; NaN where the reward failed.
        group_ids: [B] int64, equal for the samples of one prompt.
        normalize_by_std: divide by the group's standard deviation + eps.

    Returns: [B] fp32, in the order of `rewards`.
    Raises: ValueError for wrong shapes or dtypes, or, on CPU, a reward that is infinite in fp32. (Elsewhere
        looking at rewards would stop the stream; the advantages of such a group are NaN.)
    """
    if rewards.ndim != 1 or not rewards.is_floating_point():
        raise ValueError(f"rewards must be a float tensor [B], got {rewards.dtype} {list(rewards.shape)}")
    if group_ids.shape != rewards.shape or group_ids.dtype != torch.int64:
        raise ValueError(
            f"group_ids must be int64 {list(rewards.shape)} like rewards, got {group_ids.dtype} "
            f"{list(group_ids.shape)}"
        )
    given, rewards = rewards, rewards.float()
    if rewards.device.type == "cpu" and bool(rewards.isinf().any()):
        index = int(rewards.isinf().nonzero()[0])
        raise ValueError(
            f"rewards[{index}] ({given[index].item()}) must be finite in fp32, or NaN for a failed sample"
        )
    if backend(rewards) == "torch":
        return _compute_torch(rewards, group_ids, normalize_by_std, eps)
    from megarl.kernels import group_advantages_triton

    return group_advantages_triton.group_advantages(rewards, group_ids, normalize_by_std, eps)


def _compute_torch(rewards: Tensor, group_ids: Tensor, normalize_by_std: bool, eps: float) -> Tensor:
    ids, group = group_ids.unique(return_inverse=True)
    is_valid = ~rewards.isnan()
    # In fp64 a sum of equal fp32 rewards is exact, so that equal rewards give exactly 0.
    values = torch.where(is_valid, rewards.double(), 0.0)
    zeros = torch.zeros(len(ids), dtype=torch.float64, device=rewards.device)
    count = zeros.index_add(0, group, is_valid.double())
    mean = zeros.index_add(0, group, values) / count.clamp(min=1)
    centered = torch.where(is_valid, values - mean[group], 0.0)
    if not normalize_by_std:
        return centered.float()
    variance = zeros.index_add(0, group, centered.square()) / (count - 1).clamp(min=1)
    return (centered / (variance.sqrt() + eps)[group]).float()
