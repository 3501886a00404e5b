"""Sample tokens from logits as vLLM does on a CPU, with the noise that draws.py defines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megarl.rollout.draws import draw_seeds, token_noise
from megarl.rollout.requests import Request


def sample(
    logits: Tensor, requests: Sequence[Request], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Return one sampled token per row, and its log-prob in the distribution that it was sampled from.

    Args:
        logits: [B, V] float32; overwritten.
        requests: the request of each row.
        positions: number of tokens before the sampled one, prompt and response together."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    logits /= column([request.temperature or 1.0 for request in requests])
    if any(request.top_k for request in requests) or any(request.top_p < 1.0 for request in requests):
        logits = _most_likely(
            logits,
            column([request.top_k or logits.shape[1] for request in requests]),
            column([request.top_p for request in requests]),
        )
    log_probs = logits.log_softmax(-1)
    tokens = logits.argmax(-1)
    if any(request.temperature for request in requests):
        keys = np.array([request.key for request in requests], np.uint64)
        seeds = torch.from_numpy(draw_seeds(keys, np.array(positions))).to(logits.device)
        drawn = (logits.double() + token_noise(seeds, logits.shape[1])).argmax(-1)
        is_greedy = column([request.temperature == 0 for request in requests])[:, 0]
        tokens = torch.where(is_greedy, tokens, drawn)
    return tokens.tolist(), log_probs.gather(1, tokens[:, None])[:, 0].tolist()


def _most_likely(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the logits with -inf for all but the most likely tokens: top_k of them, with a probability of
    top_p together. A token as likely as the last one of top_k stays.

    Takes logits [B, V], top_k [B, 1] whole numbers, top_p [B, 1]."""
    ascending, order = logits.sort(-1)
    least = ascending.gather(1, (logits.shape[1] - top_k.clamp(max=logits.shape[1])).long())
    ascending.masked_fill_(ascending < least, -torch.inf)
    unlikely = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    unlikely[:, -1] = False  # one token is always left
    ascending.masked_fill_(unlikely, -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ascending)
