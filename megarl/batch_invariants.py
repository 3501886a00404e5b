"""The invariants of tensors, for the ranks; what they are for is in invariants.py."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from megarl.batch import Batch
from megarl.invariants import InvariantError, digest_of_bytes

_LARGEST_LOG_PROB = 1e-3  # samplers round: log 1 may come out as a little more than 0


def check_batch(batch: Batch, expected: Mapping[int, int | None], vocab_size: int) -> None:
    """What a rank is about to train on.

    Args:
        expected: sample id -> digest of what the engine made, of exactly the samples that this rank trains on; None: not known."""
    ids = batch.sample_ids.tolist()
    if sorted(ids) != sorted(expected):
        odd = min(
            set(ids) ^ expected.keys(),
            default=next((i for i, count in Counter(ids).items() if count > 1), None),
        )
        raise InvariantError(
            f"sample {odd} is here and should not be, or should be and is not: this rank has {len(ids)} samples, "
            f"and {len(expected)} are planned for it"
        )
    cu_seqlens = batch.cu_seqlens.tolist()
    if len(cu_seqlens) != len(ids) + 1 or cu_seqlens[0] != 0 or cu_seqlens[-1] != len(batch.tokens):
        raise InvariantError(
            f"cu_seqlens ({cu_seqlens[0]} ... {cu_seqlens[-1]}, {len(cu_seqlens)} of them) do not cover the "
            f"{len(batch.tokens)} tokens of {len(ids)} samples"
        )
    if len(batch.tokens) and not 0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < vocab_size:
        raise InvariantError(
            f"token ids {int(batch.tokens.min())} to {int(batch.tokens.max())} are not all in the vocabulary of {vocab_size}"
        )
    mask, response_lengths = batch.response_mask, batch.response_lengths
    if len(ids) and bool((wrong := (response_lengths == 0) | mask[batch.cu_seqlens[:-1]]).any()):
        row = int(wrong.nonzero()[0])
        raise InvariantError(
            f"sample {ids[row]}: its mask covers {int(response_lengths[row])} of {int(batch.lengths[row])} tokens; it must cover a "
            "response, and not the first token, which nothing predicts"
        )
    for sample, found in zip(
        ids, _digests(batch.tokens, mask, batch.lengths - response_lengths, response_lengths), strict=True
    ):
        if expected[sample] not in (None, found):
            raise InvariantError(
                f"sample {sample}: its tokens or its mask are not those that the engine made (digest {found:08x}, made "
                f"{expected[sample]:08x})"
            )
    if batch.rollout_log_probs is not None:
        check_column(batch, "rollout_log_probs", largest=_LARGEST_LOG_PROB)


def check_column(batch: Batch, name: str, largest: float = math.inf, may_be_nan: bool = False) -> None:
    """One number per token: finite and at most `largest` on response tokens, 0 elsewhere.

    Args:
        may_be_nan: for returns, which a sample without a reward has not."""
    column = getattr(batch, name)
    wrong = ~(column <= largest) | column.isinf()
    if may_be_nan:
        wrong &= ~column.isnan()
    wrong = torch.where(batch.response_mask, wrong, column != 0)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        row = int(torch.searchsorted(batch.cu_seqlens, at, right=True)) - 1
        kind = "response" if bool(batch.response_mask[at]) else "prompt"
        rule = (
            "finite" + (f" and at most {largest:g}" if largest < math.inf else "")
            if kind == "response"
            else "0"
        )
        raise InvariantError(
            f"{name} of sample {int(batch.sample_ids[row])} is {float(column[at])} at position {at - int(batch.cu_seqlens[row])}, a "
            f"{kind} token; there it must be {rule}"
        )


def _digests(
    tokens: torch.Tensor, mask: torch.Tensor, prompt_lengths: torch.Tensor, response_lengths: torch.Tensor
) -> Iterator[int]:
    """Of each sample of a packed batch, whatever its mask covers."""
    prompts, responses = (memoryview(tokens[part].numpy()).cast("B") for part in (~mask, mask))
    at, end = 0, 0
    for prompt, response in zip((8 * prompt_lengths).tolist(), (8 * response_lengths).tolist()):
        yield digest_of_bytes(prompts[at : at + prompt], responses[end : end + response])
        at, end = at + prompt, end + response
