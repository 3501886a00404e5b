"""Per-token estimates of KL(policy || reference) from tokens that the policy sampled (Schulman,
joschu.net/blog/kl-approx.html).

With d = log_probs - ref_log_probs:

    k1  = d                    unbiased, but noisy and of either sign
    abs = |d|                  biased: a distance, not an estimate of the KL
    k2  = d^2 / 2              biased, small variance, >= 0
    k3  = exp(-d) - 1 + d      unbiased, small variance, >= 0; held at 10, without gradient, where it would be more

What they do as a *loss* is another question: a good estimate of a value need not have a good gradient
(arXiv:2510.01555). For tokens sampled from the policy that is differentiated:

    k1  gradient 1, so its expectation is 0: noise that pulls the policy nowhere. Right in the reward, useless
    in a loss. abs gradient of size 1 towards the reference, however near it is.
    k2  gradient d: unbiased for the gradient of KL(policy || reference), the same as k1 in the reward.
    k3  gradient 1 - exp(-d): of KL(reference || policy); equal to k2's to first order in d.

`straight_through` shows the value of any of them and has the gradient of k2, unlimited.

The limit of k3 is verl's: it is met where the policy's probability fell below 1/13 of the reference's, or is
e^11 times as large. One launch reads 8 and writes 8 bytes per token: the estimate, and its slope for the
backward.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megarl.kernels.backend import backend
from megarl.kernels.checks import check_choice, check_column, check_constants
from megarl.kernels.gradient import with_gradient
from megarl.kernels.limits import MAX_EXPONENT, MAX_K3

KLEstimator = Literal["k1", "abs", "k2", "k3"]


def kl_estimate_ref(
    log_probs: Tensor, ref_log_probs: Tensor, kind: KLEstimator, straight_through: bool = False
) -> Tensor:
    """Specification of `kl_estimate` for tests: return the estimates [N], in fp64 and differentiated by
    autograd."""
    d = log_probs.double() - ref_log_probs.double()
    limited = d.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    k3 = (torch.expm1(-limited) + limited).clamp(max=MAX_K3)
    value = {"k1": d, "abs": d.abs(), "k2": d.square() / 2, "k3": k3}[kind]
    k2 = d.square() / 2
    return value.detach() + k2 - k2.detach() if straight_through else value


def at_least_fp32(x: Tensor | None) -> Tensor | None:
    """Convert to fp32, in which the kernels compute; fp64 stays, for gradient checks."""
    return None if x is None else x.to(torch.promote_types(x.dtype, torch.float32))


def kl_and_slope(d: Tensor, kind: KLEstimator, straight_through: bool) -> tuple[Tensor, Tensor]:
    """Return the KL estimate of each token and its derivative, for differences d [N] of log-probs. The
    derivative is written by hand, because autograd's derivative of exp(-d) + d loses all digits where d is
    small, as on every early step."""
    match kind:
        case "k1":
            value, slope = d, torch.ones_like(d)
        case "abs":
            value, slope = d.abs(), torch.where(d.isnan(), d, d.sign())
        case "k2":
            value, slope = d.square() / 2, d
        case _:
            limited = d.clamp(-MAX_EXPONENT, MAX_EXPONENT)
            negative_slope = torch.expm1(-limited)
            value = negative_slope + limited
            slope = torch.where(value > MAX_K3, 0, -negative_slope)
            value = value.clamp(max=MAX_K3)
    return value, d if straight_through else slope


def kl_estimate(
    log_probs: Tensor, ref_log_probs: Tensor, kind: KLEstimator, straight_through: bool = False
) -> Tensor:
    """Return the KL estimate per token [N] from log_probs [N] and ref_log_probs [N], fp32. Differentiable in
    `log_probs` only.

    Raises: ValueError for an unknown kind, different shapes, or a ref_log_probs that requires a gradient.
    """
    check_choice("kind", kind, KLEstimator)
    check_column("ref_log_probs", ref_log_probs, "log_probs", log_probs)
    check_constants({"ref_log_probs": ref_log_probs})
    (value,) = with_gradient(_value_and_slope, log_probs, ref_log_probs, kind, straight_through)
    return value


def _value_and_slope(
    log_probs: Tensor, ref_log_probs: Tensor, kind: KLEstimator, straight_through: bool
) -> tuple[Tensor, Tensor]:
    if backend(log_probs) == "triton":
        from megarl.kernels import kl_triton

        return kl_triton.kl_and_slope(log_probs, ref_log_probs, kind, straight_through)
    return kl_and_slope(at_least_fp32(log_probs) - at_least_fp32(ref_log_probs), kind, straight_through)
