"""Compare the trainer's log-probs of sampled tokens with the engine's."""

from __future__ import annotations

import torch

from megarl.batch import Batch


def mismatch_metrics(
    log_probs: torch.Tensor, gap: torch.Tensor, num_tokens: int, outlier: float
) -> dict[str, float]:
    """Return this rank's part of the metrics mismatch/* of tokens.

    Args:
        gap: trainer's log-probs - engine's.
        num_tokens: number of the tokens on all ranks.
        outlier: a larger gap is one of an outlier."""
    return {
        "mismatch/mean_abs": gap.abs().sum().item() / num_tokens,
        "mismatch/clipped_abs": gap.abs().clamp(max=outlier).sum().item() / num_tokens,
        "mismatch/log_prob_abs": log_probs.abs().sum().item() / num_tokens,
        "mismatch/max_abs": gap.abs().max().item() if len(gap) else 0.0,
        "mismatch/outliers": (gap.abs() > outlier).sum().item(),
        "mismatch/tokens": len(gap),
        "mismatch/kl": (gap.expm1() - gap).sum().item() / num_tokens,
    }


def log_probs_at(batch: Batch, tokens: list[int]) -> list[dict[str, int | float]]:
    """Return trainer's and engine's log-prob of these tokens of a batch, and where the tokens are."""
    rows = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
    return [
        {
            "sample_id": int(batch.sample_ids[rows[i]]),
            "position": int(i - batch.cu_seqlens[rows[i]]),
            "token": int(batch.tokens[i]),
            "trainer": float(batch.old_log_probs[i]),
            "engine": float(batch.rollout_log_probs[i]),
        }
        for i in tokens
    ]
