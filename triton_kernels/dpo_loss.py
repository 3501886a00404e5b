"""Preference losses of pairs of packed sequences, with the sums over tokens and the gradient, in one launch.

With s = sum over the tokens of a sequence of log_probs - ref_log_probs, and the margin h = s(chosen) -
s(rejected) of a pair:

    sigmoid  -(1 - label_smoothing) log sigmoid(beta h) - label_smoothing log sigmoid(-beta h)     DPO, arXiv:2305.18290, eq. 7;
             label_smoothing: cDPO (ericmitchell.ai/cdpo.pdf), the share of labels believed to be wrong
    ipo      (h - 1 / (2 beta))^2                                                                  arXiv:2310.12036, eq. 17
    total    = sum_p weights_p loss_p

IPO is as in its paper, of sums; TRL's takes means over tokens. The gradient to a token's log-prob is weights
dloss/dh for the chosen sequence and its negative for the rejected one. Tokens with mask False do not exist.
14 bytes per token, and no [T] buffer besides the gradient.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megarl.kernels.backend import backend
from megarl.kernels.checks import check_choice, check_constants, check_cu_seqlens, check_mask
from megarl.kernels.gradient import with_gradient
from megarl.kernels.kl import at_least_fp32

DPOKind = Literal["sigmoid", "ipo"]


class DPOStats(NamedTuple):
    """Sums, not means, over the pairs, without gradient. A reward is beta times the log-ratio of a sequence
    to the reference."""

    num_correct: Tensor
    """Pairs whose chosen sequence has the larger reward."""
    chosen_reward_sum: Tensor
    rejected_reward_sum: Tensor


def dpo_loss_ref(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    weights: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    kind: DPOKind = "sigmoid",
) -> Tensor:
    """Specification of `dpo_loss` for tests: return the loss, one pair after another, in fp64 and
    differentiated by autograd."""
    total, ends = torch.zeros((), dtype=torch.float64), cu_seqlens.tolist()
    log_ratio = [
        (log_probs[a:b].double() - ref_log_probs[a:b].double())[mask[a:b]].sum()
        for a, b in zip(ends, ends[1:])
    ]
    for weight, chosen, rejected in zip(weights.double(), log_ratio[::2], log_ratio[1::2]):
        margin = chosen - rejected
        if kind == "ipo":
            loss = (margin - 1 / (2 * beta)) ** 2
        else:
            log_sigmoid = torch.nn.functional.logsigmoid
            loss = -(1 - label_smoothing) * log_sigmoid(beta * margin) - label_smoothing * log_sigmoid(
                -beta * margin
            )
        total = total + weight * loss
    return total


def dpo_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    weights: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    kind: DPOKind = "sigmoid",
) -> tuple[Tensor, DPOStats]:
    """Return the sum of the weighted losses of P pairs, and `DPOStats`. Differentiable in `log_probs` only.

    Args:
        log_probs: [T] fp32, of the policy now, packed.
        ref_log_probs: [T] fp32, constants.
        mask: [T] bool, the response tokens. What the others hold is not read.
        cu_seqlens: [2 P + 1] int32 or int64, from 0 to T: sequence 2 p is the chosen one of pair p, 2 p + 1
            the rejected one.
        weights: [P] fp32, constants: 1 / pairs of the whole mini-batch. The loss is summed, never divided.
        beta: strength of the pull towards the reference, > 0.
        label_smoothing: in [0, 1/2); sigmoid only.

    Returns: the loss, a scalar, and `DPOStats`. P may be 0.
    Raises: ValueError for wrong shapes, dtypes or numbers, or a constant that requires a gradient.
    """
    _check(log_probs, ref_log_probs, mask, cu_seqlens, weights, beta, label_smoothing, kind)
    constants = ref_log_probs, mask, cu_seqlens, weights, float(beta), float(label_smoothing), kind
    loss, *stats = with_gradient(_compute, log_probs, *constants)
    return loss, DPOStats(*stats)


def _check(log_probs, ref_log_probs, mask, cu_seqlens, weights, beta, label_smoothing, kind) -> None:
    if log_probs.ndim != 1 or ref_log_probs.shape != log_probs.shape:
        raise ValueError(
            f"log_probs and ref_log_probs must be [T], got {list(log_probs.shape)} and "
            f"{list(ref_log_probs.shape)}"
        )
    check_mask(mask, "log_probs", log_probs)
    check_cu_seqlens(cu_seqlens, len(log_probs))
    if len(cu_seqlens) % 2 == 0 or weights.shape != (len(cu_seqlens) // 2,):
        raise ValueError(
            f"cu_seqlens must be [2 P + 1] and weights [P], for a chosen and a rejected sequence per pair, "
            f"got {list(cu_seqlens.shape)} and {list(weights.shape)}"
        )
    check_constants({"ref_log_probs": ref_log_probs, "weights": weights})
    check_choice("kind", kind, DPOKind)
    if not beta > 0:
        raise ValueError(f"beta ({beta}) must be above 0, e.g. 0.1")
    if not 0 <= label_smoothing < 0.5 or (kind == "ipo" and label_smoothing != 0):
        raise ValueError(
            f"label_smoothing ({label_smoothing}) must be in [0, 0.5), and 0 with kind 'ipo'; kind "
            f"is {kind!r}"
        )


def _compute(
    log_probs, ref_log_probs, mask, cu_seqlens, weights, beta, label_smoothing, kind
) -> tuple[Tensor, ...]:
    """Return (loss, gradient [T], the fields of DPOStats)."""
    if backend(log_probs) == "triton":
        from megarl.kernels import dpo_loss_triton

        return dpo_loss_triton.dpo_loss(
            log_probs, ref_log_probs, mask, cu_seqlens, weights, beta, label_smoothing, kind
        )
    log_ratio = torch.where(mask, at_least_fp32(log_probs) - at_least_fp32(ref_log_probs), 0)
    # In fp64: a margin of 1 may be the difference of sums of thousands.
    sums = torch.segment_reduce(log_ratio.double(), "sum", offsets=cu_seqlens.long(), initial=0).view(-1, 2)
    margin = (sums[:, 0] - sums[:, 1]).to(log_ratio.dtype)
    chosen, rejected = sums.to(log_ratio.dtype).unbind(1)
    if kind == "ipo":
        error = margin - 1 / (2 * beta)
        loss, slope = error.square(), 2 * error
    else:
        logits = beta * margin
        log_sigmoid = torch.nn.functional.logsigmoid
        loss = -(1 - label_smoothing) * log_sigmoid(logits) - label_smoothing * log_sigmoid(-logits)
        slope = beta * (
            label_smoothing * torch.sigmoid(logits) - (1 - label_smoothing) * torch.sigmoid(-logits)
        )
    slope = slope * weights
    gradient = torch.stack([slope, -slope], 1).flatten().repeat_interleave(cu_seqlens.diff())
    stats = (margin > 0).sum().to(loss.dtype), beta * chosen.sum(), beta * rejected.sum()
    return (loss * weights).sum(), torch.where(mask, gradient, 0), *stats
