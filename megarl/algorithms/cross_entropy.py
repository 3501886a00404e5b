"""The `ce` stream of a loss: cross-entropy on given tokens, divided by a count of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def cross_entropy(log_probs: Tensor, num_tokens: int) -> Tensor:
    """Return this part's share of the mean negative log-prob over `num_tokens` tokens of the whole
    mini-batch."""
    return -log_probs.sum() / num_tokens
