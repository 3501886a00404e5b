"""Compute off-policy corrections: weights of the policy loss that account for the difference between the
policy that is trained and the engine, or older weights, that sampled.

With w = exp(log pi_old - log mu) of each response token, where mu is the engine's probability:

    --tis-clip C               min(w, C); with --tis-level sequence min(product of w over the response, C)
    --mis-level token          0 where w is outside [--mis-low, --mis-high]      (IcePop, arXiv:2510.18855)
    --mis-level sequence       0 on a response whose product of w is outside
    --mis-level geometric      0 on a response whose geometric mean of w is outside
    --token-veto V             0 on a response of which some token has w < V

The factors are multiplied. pi_old and mu do not change during a step, so the weights are a column that is
computed once, beside the advantages, from whole responses: any ratio transform can be combined with them, and
token-level losses stay token-level. min(w, C) of tokens is the exception: the loss itself computes it.
A token of weight 0 stays in the loss's denominators.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from megarl.config.errors import FieldRules

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algorithms.base import AdvantageInputs


class CorrectionFlags(Protocol):
    """The fields of an algorithm that choose its corrections."""

    tis_clip: float | None
    tis_level: str
    mis_level: str
    mis_low: float
    mis_high: float
    token_veto: float | None
    has_correction_column: bool


MIS_BOUNDS = {"token": (0.5, 5.0), "sequence": (0.5, 2.0), "geometric": (0.99, 1.01)}
"""--mis-level -> defaults of --mis-low and --mis-high."""


def correction_rules(flags: CorrectionFlags) -> FieldRules:
    """Return the rules between the flags of the corrections."""
    yield (
        flags.tis_level == "token" or flags.tis_clip is not None,
        "tis_level",
        "needs --tis-clip. Try --tis-clip 2.",
    )
    for name in ("mis_low", "mis_high"):
        is_read = flags.mis_level != "none" or getattr(flags, name) is None
        yield is_read, name, "needs --mis-level token, sequence or geometric. Leave it out."


def correction_weights(
    flags: CorrectionFlags, inputs: AdvantageInputs
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the column correction_weights, if a correction needs it, and this rank's part of the metrics.
    One sum over ranks.

    Metrics, over the tokens of samples with a reward: correction/weight, the mean weight;
    correction/effective_sample_size, (sum of weights)^2 / (tokens x sum of squares);
    correction/tis_truncated, correction/mis_masked and correction/veto_masked, shares of tokens.
    """
    import torch

    lengths = inputs.response_lengths
    row = torch.arange(len(lengths)).repeat_interleave(lengths)
    log_w = inputs.old_log_probs.double() - inputs.rollout_log_probs.double()
    total = log_w.new_zeros(len(lengths)).index_add(0, row, log_w)
    levels = {"token": log_w, "sequence": total[row], "geometric": (total / lengths)[row]}
    column, everything = torch.ones_like(log_w), torch.ones_like(log_w)
    shares: dict[str, Tensor] = {}
    if flags.tis_clip is not None:
        measured, limit = levels[flags.tis_level], math.log(flags.tis_clip)
        everything = measured.clamp(max=limit).exp()
        column = everything if flags.tis_level == "sequence" else column
        shares["tis_truncated"] = measured > limit
    if flags.mis_level != "none":
        measured = levels[flags.mis_level]
        bounds = math.log(flags.mis_low), math.log(flags.mis_high)
        shares["mis_masked"] = (measured < bounds[0]) | (measured > bounds[1])
    if flags.token_veto is not None:
        is_vetoed = (log_w < math.log(flags.token_veto)).double()
        shares["veto_masked"] = log_w.new_zeros(len(lengths)).index_add(0, row, is_vetoed)[row] > 0
    for name in ("mis_masked", "veto_masked"):
        if name in shares:
            column, everything = column * ~shares[name], everything * ~shares[name]
    is_scored = inputs.spread(~inputs.rewards.isnan())
    parts = [torch.ones_like(log_w), everything, everything.square(), *(s.double() for s in shares.values())]
    here = torch.stack([part[is_scored].sum() for part in parts])
    names = ["weight", "effective_sample_size", *shares]
    count, weight, squares, *masked = inputs.sum_over_ranks(here.clone()).tolist()
    count = max(count, 1.0)
    size = weight**2 / (count * squares) if squares else 0.0
    # The parts of all ranks add up to the metric.
    share = float(here[0]) / count
    values = [weight / count, size, *(number / count for number in masked)]
    metrics = {f"correction/{name}": value * share for name, value in zip(names, values, strict=True)}
    return {"correction_weights": column.float()} if flags.has_correction_column else {}, metrics
