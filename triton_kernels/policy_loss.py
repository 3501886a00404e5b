"""The policy loss of PPO and its relatives with everything that is added to it, and its gradient, in one
launch.

    ratio = exp(log_probs - old_log_probs)

    ppo     policy = max(-A ratio, -A clip(ratio, 1 - clip_eps_low, 1 + clip_eps_high))   arXiv:1707.06347, eq. 7; DAPO 2503.14476
            policy = min(policy, -A clip_ratio_c)   where A < 0: dual clip, arXiv:1912.09729
    cispo   policy = -A stop_gradient(clip(ratio, ...)) log_probs                         arXiv:2506.13585, eq. 4

    tis     = min(exp(old_log_probs - rollout_log_probs), tis_clip)     truncated importance sampling, a constant; 1 without
    loss    = tis policy + kl_coef kl(log_probs, ref_log_probs) - entropy_coef entropy
    total   = sum_i weights_i loss_i

The gradient of ppo to a log-prob is -A ratio where neither clip holds the loss, else 0; log_probs -
old_log_probs is limited to +-20 (a ratio of 5e8), with gradient 0 beyond. That of cispo is -A clip(ratio):
the clip bounds it and never takes it away. kl.py has the KL estimates and their slopes. A token of weight 0
does not exist: whatever the other columns hold there.

Everything is known in the forward pass, so the only tensor that is made and kept is the gradient. Reading up
to seven columns and writing one is 32 bytes per token, against some forty launches and buffers for PyTorch's
graph of the same formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.kernels.backend import backend
from megarl.kernels.checks import check_choice, check_column, check_constants
from megarl.kernels.kl import KLEstimator, at_least_fp32, kl_and_slope, kl_estimate_ref
from megarl.kernels.limits import MAX_LOG_RATIO

PolicyLossKind = Literal["ppo", "cispo"]


class PolicyLossColumns(NamedTuple):
    """The tensors [N] that `policy_loss` takes, by their names in the module's formula."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    weights: Tensor
    rollout_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    entropy: Tensor | None


class PolicyLossStats(NamedTuple):
    """Sums, not means, over the tokens whose weight is not 0, without gradient."""

    num_clipped: Tensor
    """ppo: tokens whose loss is the clipped one, so that they have no gradient. cispo: tokens whose ratio
    the clip changed."""
    num_dual_clipped: Tensor
    """Tokens with a negative advantage whose loss is the dual clip's bound."""
    kl_sum: Tensor
    """Sum of ratio - 1 - log ratio: the k3 estimate of KL(old || now), for tokens sampled from old."""
    ref_kl_sum: Tensor | None
    """Sum of the KL estimates to the reference; None without `ref_log_probs`."""
    tis_weight_sum: Tensor | None
    """Sum of truncated importance weights; None without `tis_clip`."""
    entropy_sum: Tensor | None
    """Sum of `entropy`; None without."""
    ratio_deviation_max: Tensor
    """Largest |ratio - 1|; 0 for no tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossOptions:
    """Coefficients, clip bounds and choices of the policy loss, by their names in the module's formula."""

    clip_eps_low: float
    clip_eps_high: float
    """The ratio is clipped to [1 - clip_eps_low, 1 + clip_eps_high]."""
    clip_ratio_c: float | None = None
    """ppo: bound of the ratio for negative advantages, > 1. None: no dual clip."""
    kind: PolicyLossKind = "ppo"
    tis_clip: float | None = None
    """Bound of the importance weight to the engine that sampled, > 0. None: no such weight."""
    kl_estimator: KLEstimator = "k3"
    kl_straight_through: bool = False
    """The KL has the gradient of k2."""
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, PolicyLossKind)
        check_choice("kl_estimator", self.kl_estimator, KLEstimator)
        if self.kind == "cispo" and self.clip_ratio_c is not None:
            raise ValueError(
                f"clip_ratio_c ({self.clip_ratio_c}) must be None with kind 'cispo', whose clip "
                "bounds every ratio"
            )


def policy_loss_ref(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    options: PolicyLossOptions,
    *,
    rollout_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> Tensor:
    """Specification of `policy_loss` for tests: return the loss of the tokens whose weight is not 0, in fp64
    and differentiated by autograd."""
    exists = weights != 0
    columns = (log_probs, old_log_probs, advantages, weights, rollout_log_probs, ref_log_probs, entropy)
    log_probs, old, advantages, weights, rollout, ref, entropy = (
        None if x is None else x[exists].double() for x in columns
    )
    ratio = (log_probs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_ratio = ratio.clamp(1 - options.clip_eps_low, 1 + options.clip_eps_high)
    if options.kind == "cispo":
        loss = -advantages * clipped_ratio.detach() * log_probs
    else:
        loss = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    if options.clip_ratio_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * options.clip_ratio_c), loss)
    if options.tis_clip is not None:
        loss = loss * (old - rollout).exp().clamp(max=options.tis_clip)
    if options.kl_coef != 0:
        loss = loss + options.kl_coef * kl_estimate_ref(
            log_probs, ref, options.kl_estimator, options.kl_straight_through
        )
    if options.entropy_coef != 0:
        loss = loss - options.entropy_coef * entropy
    return (weights * loss).sum()


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    options: PolicyLossOptions,
    *,
    rollout_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, PolicyLossStats]:
    """Return the sum of the weighted losses of N tokens, and `PolicyLossStats`. Differentiable in `log_probs`
    and `entropy` only.

    Args:
        log_probs: [N] fp32, of the policy now.
        old_log_probs, advantages: [N] fp32, constants.
        weights: [N] fp32, constants: a token's share of the mean over the whole mini-batch (`token_weights`);
            0 takes a token out. The loss is summed, never divided.
        rollout_log_probs: [N] fp32, constants; with `tis_clip`.
        ref_log_probs: [N] fp32, constants; with `kl_coef`, and without for `ref_kl_sum` alone.
        entropy: [N] fp32; with `entropy_coef`, and without for `entropy_sum` alone.

    Returns: the loss, a scalar, and `PolicyLossStats`. N may be 0: all zeros, with a gradient of shape [0].
    Raises: ValueError if shapes differ, if a constant requires a gradient, or if a column that an option
    needs is missing.
    """
    columns = PolicyLossColumns(
        log_probs, old_log_probs, advantages, weights, rollout_log_probs, ref_log_probs, entropy
    )
    _check(columns, options)
    loss, *stats = _PolicyLoss.apply(log_probs, entropy, columns, options)
    return loss, PolicyLossStats(*stats)


def _check(columns: PolicyLossColumns, options: PolicyLossOptions) -> None:
    given = {name: tensor for name, tensor in columns._asdict().items() if tensor is not None}
    for name, tensor in given.items():
        check_column(name, tensor, "log_probs", columns.log_probs)
    check_constants({name: given[name] for name in given.keys() - {"log_probs", "entropy"}})
    for name, option, is_used in (
        ("rollout_log_probs", f"tis_clip ({options.tis_clip})", options.tis_clip is not None),
        ("ref_log_probs", f"kl_coef ({options.kl_coef})", options.kl_coef != 0),
        ("entropy", f"entropy_coef ({options.entropy_coef})", options.entropy_coef != 0),
    ):
        if is_used and name not in given:
            raise ValueError(f"{name} is None, but {option} needs it: pass [N] like log_probs")


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_probs, entropy, columns, options):
        loss, gradient, stats = _compute(columns, options)
        ctx.entropy_coef = options.entropy_coef
        ctx.save_for_backward(gradient, columns.weights if options.entropy_coef != 0 else None)
        ctx.mark_non_differentiable(*(total for total in stats if total is not None))
        return loss, *stats

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, *_):
        gradient, weights = ctx.saved_tensors
        entropy_gradient = None
        if ctx.needs_input_grad[1] and weights is not None:
            entropy_gradient = weights * (-ctx.entropy_coef * grad_loss)
        return gradient * grad_loss, entropy_gradient, None, None


def _compute(
    columns: PolicyLossColumns, options: PolicyLossOptions
) -> tuple[Tensor, Tensor, PolicyLossStats]:
    """Compute (loss, gradient [N], statistics) with the tensors' backend."""
    if backend(columns.log_probs) == "triton":
        from megarl.kernels import policy_loss_triton

        loss, gradient, stats = policy_loss_triton.policy_loss(columns, options)
        return loss, gradient, PolicyLossStats(*stats)
    log_probs, old_log_probs, advantages, weights, rollout_log_probs, ref_log_probs, entropy = map(
        at_least_fp32, columns
    )
    exists = weights != 0
    log_probs, advantages = torch.where(exists, log_probs, 0), torch.where(exists, advantages, 0)
    difference = torch.where(exists, log_probs - old_log_probs, 0)
    log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = torch.exp(log_ratio)
    clipped_ratio = ratio.clamp(1 - options.clip_eps_low, 1 + options.clip_eps_high)
    num_dual_clipped, tis_weight_sum, ref_kl_sum, entropy_sum = log_ratio.new_zeros(()), None, None, None
    if options.kind == "cispo":
        is_clipped = clipped_ratio != ratio
        slope = -advantages * clipped_ratio
        loss = slope * log_probs
    else:
        loss = -advantages * ratio
        clipped_loss = -advantages * clipped_ratio
        is_clipped = clipped_loss > loss
        slope = torch.where(is_clipped | (difference.abs() > MAX_LOG_RATIO), 0, loss)
        loss = torch.maximum(loss, clipped_loss)
    if options.clip_ratio_c is not None:
        bound = -advantages * options.clip_ratio_c
        is_dual_clipped = (advantages < 0) & (loss > bound)
        loss, slope = torch.where(is_dual_clipped, bound, loss), torch.where(is_dual_clipped, 0, slope)
        num_dual_clipped = is_dual_clipped.sum().to(loss.dtype)
    policy_weights = weights
    if options.tis_clip is not None:
        tis = torch.where(
            exists, (old_log_probs - rollout_log_probs).clamp(max=math.log(options.tis_clip)).exp(), 0
        )
        policy_weights, tis_weight_sum = weights * tis, tis.sum()
    total, gradient = (loss * policy_weights).sum(), slope * policy_weights
    if ref_log_probs is not None:
        kl, kl_slope = kl_and_slope(
            torch.where(exists, log_probs - ref_log_probs, 0),
            options.kl_estimator,
            options.kl_straight_through,
        )
        ref_kl_sum = kl.sum()
        if options.kl_coef != 0:
            total = total + options.kl_coef * (weights * kl).sum()
            gradient = gradient + options.kl_coef * (weights * kl_slope)
    if entropy is not None:
        entropy = torch.where(exists, entropy, 0)
        entropy_sum = entropy.sum()
        if options.entropy_coef != 0:
            total = total - options.entropy_coef * (weights * entropy).sum()
    deviation = (ratio - 1).abs().max() if len(ratio) else total.new_zeros(())
    num_clipped, kl_sum = is_clipped.sum().to(total.dtype), (torch.expm1(log_ratio) - log_ratio).sum()
    return (
        total,
        gradient,
        PolicyLossStats(
            num_clipped, num_dual_clipped, kl_sum, ref_kl_sum, tis_weight_sum, entropy_sum, deviation
        ),
    )
