"""Define the inputs of the losses of critics and of reward models in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLossInputs:
    """Inputs of the critic's loss: columns of the N response tokens of one micro-batch on one rank. Counts
    and samples are as in `LossInputs`."""

    values: Tensor
    """[N] fp32, of the critic now; carries the gradient."""
    old_values: Tensor
    """[N] fp32, of the critic before the first update on these samples."""
    returns: Tensor
    """[N] fp32, of `compute_advantages`."""
    response_lengths: Tensor
    """[N] int64, as in `LossInputs`."""
    num_tokens: int
    num_sequences: int
    max_response_length: int
    sequence_ids: Tensor | None = None
    """[N] int64, as in `LossInputs`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreLossInputs:
    """Inputs of the loss of a reward model in training: one number per sample of one micro-batch on one
    rank, B of them. Counts are as in `LossInputs`."""

    scores: Tensor
    """[B] fp32, of the model now, at each sample's last token; carries the gradient."""
    old_scores: Tensor
    """[B] fp32, of the model before the update."""
    advantages: Tensor
    """[B] fp32, of `compute_advantages`."""
    response_lengths: Tensor
    """[B] int64, all 1: of a sample only the last token is trained on."""
    num_tokens: int
    num_sequences: int
    max_response_length: int
    sequence_ids: Tensor | None = None
    """[B] int64, as in `LossInputs`."""
