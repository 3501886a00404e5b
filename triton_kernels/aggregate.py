"""Token weights turn per-token losses into one number: the loss of a mini-batch is sum_i weights[i] loss[i].

    token-mean            1 / num_tokens                              every token counts the same (DAPO, arXiv:2503.14476)
    seq-mean-token-mean   1 / (num_sequences response_lengths[i])     every sequence counts the same (GRPO, arXiv:2402.03300)
    seq-mean-token-sum    1 / num_sequences                           a sequence counts by its length
    dr-grpo               1 / (num_sequences max_response_length)     as before, in units of a constant (arXiv:2503.20783)

All counts are of the whole mini-batch: all micro-batches, all data-parallel ranks. Sums of the weighted
losses over any split are then the loss, and sums of the gradients its gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megarl.kernels.checks import check_choice

LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"]


def token_weights_ref(
    mode: LossAggregation,
    response_lengths: Tensor,
    num_tokens: int,
    num_sequences: int,
    max_response_length: int,
) -> Tensor:
    """Specification of `token_weights` for tests: return the weights, computed token by token in fp64."""
    weight = {
        "token-mean": lambda length: 1 / num_tokens,
        "seq-mean-token-mean": lambda length: 1 / (num_sequences * length),
        "seq-mean-token-sum": lambda length: 1 / num_sequences,
        "dr-grpo": lambda length: 1 / (num_sequences * max_response_length),
    }[mode]
    return torch.tensor([weight(length) for length in response_lengths.tolist()], dtype=torch.float64)


def token_weights(
    mode: LossAggregation,
    response_lengths: Tensor,
    num_tokens: int,
    num_sequences: int,
    max_response_length: int,
) -> Tensor:
    """Return the weight of each of N response tokens in the loss of the mini-batch.

    Args:
        response_lengths: [N] int64, for each token the number of response tokens of its sequence.
        num_tokens, num_sequences: response tokens and sequences of the whole mini-batch.
        max_response_length: the longest response that sampling allows, a constant of the run.

    Returns: [N] fp32.
    Raises: ValueError for an unknown mode or a count that is not positive.
    """
    counts = {
        "num_tokens": num_tokens,
        "num_sequences": num_sequences,
        "max_response_length": max_response_length,
    }
    for name, count in counts.items():
        if count < 1:
            raise ValueError(
                f"{name} ({count}) must be at least 1: it counts the whole mini-batch, not this rank's share"
            )
    check_choice("mode", mode, LossAggregation)
    if mode == "seq-mean-token-mean":
        return torch.reciprocal(response_lengths.to(torch.float32) * num_sequences)
    denominator = _denominator(mode, num_tokens, num_sequences, max_response_length)
    return torch.full(
        response_lengths.shape, 1 / denominator, dtype=torch.float32, device=response_lengths.device
    )


def total_weight(
    mode: LossAggregation, num_tokens: int, num_sequences: int, max_response_length: int
) -> float:
    """Return the sum of the weights of all tokens of a mini-batch."""
    if mode == "seq-mean-token-mean":
        return 1.0
    return num_tokens / _denominator(mode, num_tokens, num_sequences, max_response_length)


def _denominator(mode: LossAggregation, num_tokens: int, num_sequences: int, max_response_length: int) -> int:
    """Return the number that all tokens' losses are divided by."""
    return {
        "token-mean": num_tokens,
        "seq-mean-token-sum": num_sequences,
        "dr-grpo": num_sequences * max_response_length,
    }[mode]
