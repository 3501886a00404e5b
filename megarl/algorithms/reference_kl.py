"""Estimate the KL to the reference before a step's updates, by tensors and by a slow second way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from megarl.algorithms.base import AdvantageInputs, ReferenceInputs
from megarl.algorithms.kl_controller import MEASURED_KL

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.kernels.kl import KLEstimator


class ReferenceKLFlags(Protocol):
    """The fields of an algorithm that decide whether and how its KL to the reference is estimated."""

    needs_reference: bool
    kl_estimator: KLEstimator


def reference_kl(flags: ReferenceKLFlags, inputs: AdvantageInputs) -> tuple[Tensor | None, dict[str, float]]:
    """Return the [N] KL estimate of each token to the reference, and this rank's part of its metrics; (None, {})
    without a reference.

    Metrics: kl/per_response, the mean over the step's trained samples with a reward of a response's sum, if
        there is such a sample; kl/coef."""
    if not flags.needs_reference:
        return None, {}
    from megarl.kernels.kl import kl_estimate

    kl = kl_estimate(inputs.old_log_probs, inputs.ref_log_probs, flags.kl_estimator)
    metrics = {"kl/coef": inputs.kl_coef * len(inputs.counted_rows) / inputs.num_trained}
    if num_scored := inputs.num_scored:
        is_scored = inputs.spread(~inputs.rewards.isnan())
        metrics[MEASURED_KL] = kl[is_scored].double().sum().item() / num_scored
    return kl, metrics


def kl_costs(
    flags: ReferenceKLFlags, inputs: ReferenceInputs, samples: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return, for each token of these samples, what the KL takes off its reward, and the size of the terms of
    that sum; [n] fp64 each."""
    import torch

    empty = [torch.zeros(0)]
    log_probs, ref_log_probs = (
        torch.cat(empty + [inputs.columns(sample, name) for sample in samples]).double()
        for name in ("old_log_probs", "ref_log_probs")
    )
    d = log_probs - ref_log_probs
    match flags.kl_estimator:
        case "k1":
            kl = d
        case "abs":
            kl = d.abs()
        case "k2":
            kl = d * d / 2
        case "k3":
            near = d.clamp(-20, 20)  # beyond that k3 is at its limit anyway
            kl = ((-near).exp() - 1 + near).clamp(max=10)
    sizes = (1 + log_probs.abs() + ref_log_probs.abs()) * (1 + d.abs())
    return inputs.kl_coef * kl, inputs.kl_coef * sizes
