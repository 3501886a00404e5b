"""The `ce` stream of a loss: cross-entropy on given tokens, divided by a count of its own.

The tokens are those of fine-tuning rows, or of right answers beside the policy loss (VAPO, arXiv:2504.05118, eq. 10
and 11):

    L = policy loss + mu L_NLL        L_NLL = - sum over right answers of log pi of their tokens / number of these tokens

All counts are those of the mini-batch, over all ranks. Every rank knows rewards, lengths and mini-batches of all
samples, so the weights of right answers are a column that needs no message."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


POSITIVE_NLL = "policy/positive_nll"
"""Name of the metric L_NLL, 0 in an update without a right answer."""
POSITIVE_SHARE = "policy/positive_share"
"""Name of the metric with the share of the updates that have a right answer."""


def cross_entropy(log_probs: Tensor, num_tokens: int) -> Tensor:
    """Return this part's share of the mean negative log-prob over `num_tokens` tokens of the whole
    mini-batch."""
    return -log_probs.sum() / num_tokens


def over_updates_with_answers(metrics: dict[str, float]) -> dict[str, float]:
    """Return a step's metrics, in which POSITIVE_NLL is the mean over the updates with a right answer.

    In `metrics` it is the mean over all updates. It is left out if no update has a right answer."""
    if not (share := metrics.get(POSITIVE_SHARE)):
        return {name: value for name, value in metrics.items() if name != POSITIVE_NLL}
    return metrics | {POSITIVE_NLL: metrics[POSITIVE_NLL] / share}


def nll_weights(is_right: Tensor, lengths: Tensor, mini_batches: Tensor) -> Tensor:
    """Return the [S] fp32 weight of each token of a sample: one over the tokens of all right samples of its
    mini-batch; 0 for other samples.

    Args:
        is_right: [S] bool.
        lengths: [S] int64, response tokens.
        mini_batches: [S] int64, number of the sample's mini-batch. Right samples are in one."""
    import torch

    counted = lengths.double() * is_right
    number = mini_batches.clamp(min=0)
    totals = counted.new_zeros(int(number.max()) + 1).index_add(0, number, counted)
    return torch.where(is_right, 1 / totals[number], 0.0).float()
