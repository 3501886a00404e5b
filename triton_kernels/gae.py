"""Generalized advantage estimation (arXiv:1506.02438, eq. 16) of packed sequences, in one launch.

Of the actions t of a sequence (its tokens with mask True), with V(next) the value of the next action, or of
the bootstrap after the last:

    delta[t] = rewards[t] + gamma V(next) - values[t]
    A[t]     = delta[t] + gamma gae_lambda A(next)        returns[t] = A[t] + values[t]

A token with mask False (what a tool or the environment said) is skipped: it takes no step of gamma or lambda,
its reward and value are not read, and its advantage and return are 0. A reward for the whole sequence belongs
on its last action.

Scanned from the back, (A, V) of the tokens after t give those of t on by an affine map, and affine maps
compose: one associative scan per sequence over five numbers per token, a tile at a time. Whitening needs the
mean and the variance over all data-parallel ranks, so the same launch leaves (sum, sum of squares, count) of
the advantages; the caller adds these up and calls `whiten`.

17 bytes are moved per token, and 9 more to whiten. A Python loop over the steps of padded sequences launches
about eight kernels per step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.kernels.backend import backend
from megarl.kernels.checks import check_cu_seqlens, check_mask
from megarl.kernels.limits import WHITEN_EPS


class GAE(NamedTuple):
    advantages: Tensor
    """[T] fp32, not whitened; 0 where masked."""
    returns: Tensor
    """[T] fp32, the target of the critic; 0 where masked."""
    stats: Tensor
    """[3] fp64: sum, sum of squares and count of the advantages of actions. Add up over data-parallel ranks,
    then `whiten`."""


def gae_ref(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    gae_lambda: float | Tensor,
    bootstrap_values: Tensor | None = None,
) -> GAE:
    """Specification of `gae` for tests: return the same, one token after another, in fp64."""
    rewards, values, is_action, ends = rewards.double(), values.double(), mask.tolist(), cu_seqlens.tolist()
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for sequence, (begin, end) in enumerate(zip(ends, ends[1:])):
        advantage = torch.zeros((), dtype=torch.float64)
        next_value = advantage if bootstrap_values is None else bootstrap_values[sequence].double()
        decay = gamma * (gae_lambda[sequence].double() if isinstance(gae_lambda, Tensor) else gae_lambda)
        for t in reversed(range(begin, end)):
            if is_action[t]:
                delta = rewards[t] + gamma * next_value - values[t]
                advantage = delta + decay * advantage
                next_value = values[t]
                advantages[t], returns[t] = advantage, advantage + values[t]
    return GAE(
        advantages, returns, torch.stack([advantages.sum(), advantages.square().sum(), mask.sum().double()])
    )


def whiten_ref(advantages: Tensor, mask: Tensor, stats: Tensor) -> Tensor:
    """Specification of `whiten` for tests: return the whitened advantages [T] in fp64."""
    total, squares, count = stats.tolist()
    mean = total / max(count, 1)
    variance = max(squares - total * mean, 0) / max(count - 1, 1)
    return torch.where(mask, (advantages.double() - mean) / (variance + WHITEN_EPS) ** 0.5, 0)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    gae_lambda: float | Tensor,
    bootstrap_values: Tensor | None = None,
) -> GAE:
    """Return advantages, returns and their statistics for B packed sequences, T tokens in all, without
    gradients.

    Args:
        rewards: [T] fp32, per token, already KL-shaped.
        values: [T] fp32, the critic's V of the state before each token.
        mask: [T] bool, the tokens that the policy chose. What the others hold is not read, NaN included.
        cu_seqlens: [B + 1] int32 or int64, from 0 to T: sequence b is the tokens cu_seqlens[b] to
            cu_seqlens[b + 1] - 1. May be empty.
        gamma, gae_lambda: discount per action and the estimator's decay, both in [0, 1]. The decay may be [B] fp32,
            one number per sequence.
        bootstrap_values: [B] fp32, V of the state after the last action of each sequence, where it was cut
            off. None: all ended, 0.

    Returns: `GAE`. A NaN of an action reaches itself and the actions before it in its sequence, and the
    statistics.
    Raises: ValueError for wrong shapes or dtypes, a gamma or gae_lambda outside [0, 1] (of a tensor: on CPU only),
    or, on CPU, cu_seqlens that do not go from 0 to T.
    """
    _check(rewards, values, mask, cu_seqlens, gamma, gae_lambda, bootstrap_values)
    if bootstrap_values is None:
        bootstrap_values = torch.zeros(len(cu_seqlens) - 1, dtype=torch.float32, device=rewards.device)
    with torch.no_grad():
        columns = (rewards, values, mask, cu_seqlens, bootstrap_values)
        if backend(rewards) == "torch":
            return _gae_torch(*columns, gamma, gamma * gae_lambda)
        from megarl.kernels import gae_triton

        decay = gamma * gae_lambda
        if not isinstance(decay, Tensor):
            decay = torch.full_like(bootstrap_values, decay, dtype=torch.float32)
        return GAE(*gae_triton.gae(*columns, float(gamma), decay))


def whiten(advantages: Tensor, mask: Tensor, stats: Tensor) -> Tensor:
    """Return (advantages - mean) / sqrt(variance + 1e-8), [T] fp32, where mask, else 0, with the unbiased
    variance.

    Args:
        advantages, mask: [T], of `gae`.
        stats: [3] fp64, `GAE.stats` summed over all ranks whose advantages are whitened together.
    """
    if advantages.shape != mask.shape or stats.shape != (3,) or stats.dtype != torch.float64:
        raise ValueError(
            f"advantages and mask must be [T] and stats fp64 [3], got {list(advantages.shape)}, "
            f"{list(mask.shape)} "
            f"and {stats.dtype} {list(stats.shape)}"
        )
    if backend(advantages) == "triton":
        from megarl.kernels import gae_triton

        return gae_triton.whiten(advantages, mask, stats)
    total, squares, count = stats
    mean = total / count.clamp(min=1)
    variance = (squares - total * mean).clamp(min=0) / (count - 1).clamp(min=1)
    whitened = (advantages - mean.to(advantages.dtype)) * torch.rsqrt(variance + WHITEN_EPS).to(
        advantages.dtype
    )
    return torch.where(mask, whitened, 0)


def _check(rewards, values, mask, cu_seqlens, gamma, gae_lambda, bootstrap_values) -> None:
    if rewards.ndim != 1 or not rewards.is_floating_point():
        raise ValueError(f"rewards must be a float tensor [T], got {rewards.dtype} {list(rewards.shape)}")
    if values.shape != rewards.shape or not values.is_floating_point():
        raise ValueError(
            f"values must be a float tensor {list(rewards.shape)} like rewards, got {values.dtype} "
            f"{list(values.shape)}"
        )
    check_mask(mask, "rewards", rewards)
    check_cu_seqlens(cu_seqlens, len(rewards))
    if bootstrap_values is not None and bootstrap_values.shape != (len(cu_seqlens) - 1,):
        raise ValueError(
            f"bootstrap_values must be [{len(cu_seqlens) - 1}], one per sequence, got "
            f"{list(bootstrap_values.shape)}"
        )
    numbers = {"gamma": gamma, "gae_lambda": gae_lambda}
    if isinstance(gae_lambda, Tensor):
        if gae_lambda.shape != (len(cu_seqlens) - 1,) or not gae_lambda.is_floating_point():
            raise ValueError(
                f"gae_lambda must be a number or a float tensor [{len(cu_seqlens) - 1}], one per sequence, got "
                f"{gae_lambda.dtype} {list(gae_lambda.shape)}"
            )
        is_seen = gae_lambda.device.type == "cpu" and len(
            gae_lambda
        )  # elsewhere a look would stop the stream
        numbers |= {"gae_lambda": gae_lambda.min().item() if is_seen else 0}
        numbers |= {"the largest gae_lambda": gae_lambda.max().item() if is_seen else 0}
    for name, value in numbers.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} ({value}) must be in [0, 1], e.g. 1 or 0.95")


def _gae_torch(rewards, values, mask, cu_seqlens, bootstrap_values, gamma, decay) -> GAE:
    """Compute GAE in PyTorch by a scan. Without the masked tokens the decay is the same at every step of a
    sequence, so a scan by doubling needs one multiply-add per step: after the step of s, advantages[t] holds
    the next 2 s terms of sum_n decay^n delta[t + n]. `decay`: a float, or [B]."""
    actions = mask.nonzero()[:, 0]
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    action_rewards, action_values = rewards[actions].to(dtype), values[actions].to(dtype)
    num_before = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.cumsum(0)])[cu_seqlens.long()]
    num_actions = num_before.diff()
    num_after = (
        num_before[1:].repeat_interleave(num_actions) - 1 - torch.arange(len(actions), device=mask.device)
    )
    next_values = torch.where(
        num_after == 0, bootstrap_values.to(dtype).repeat_interleave(num_actions), action_values.roll(-1)
    )
    scanned = action_rewards + gamma * next_values - action_values
    step, longest = 1, int(num_actions.max()) if len(num_actions) else 0
    if isinstance(decay, Tensor):
        decay = decay.to(dtype).repeat_interleave(num_actions)
    while step < longest:
        later = torch.where(num_after[:-step] >= step, scanned[step:], 0)
        if isinstance(decay, Tensor):
            scanned[:-step] += decay[:-step] ** step * later
        else:
            scanned[:-step].add_(later, alpha=decay**step)
        step *= 2
    advantages, returns = (torch.zeros_like(rewards, dtype=dtype) for _ in range(2))
    advantages[actions], returns[actions] = scanned, scanned + action_values
    exact = scanned.double()
    return GAE(
        advantages,
        returns,
        torch.stack([exact.sum(), exact.square().sum(), exact.new_tensor(float(len(actions)))]),
    )
