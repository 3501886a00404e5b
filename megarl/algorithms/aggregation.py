"""Weigh the tokens of a mini-batch in a loss by --loss-aggregation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algorithms.base import LossInputs
    from megarl.algorithms.value_inputs import ValueLossInputs

LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"]
"""As in megarl.kernels.aggregate, which needs torch."""


def token_weights(mode: LossAggregation, inputs: LossInputs | ValueLossInputs) -> Tensor:
    """Return the [N] fp32 weights of these tokens; the loss of the mini-batch is the weighted sum over its tokens."""
    from megarl.kernels import aggregate

    counts = inputs.num_tokens, inputs.num_sequences, inputs.max_response_length
    return aggregate.token_weights(mode, inputs.response_lengths, *counts)


def total_weight(mode: LossAggregation, *counts: int) -> float:
    """Return the sum of the weights of all tokens of a mini-batch.

    Args:
        counts: num_tokens, num_sequences and max_response_length, as in `LossInputs`."""
    from megarl.kernels import aggregate

    return aggregate.total_weight(mode, *counts)
