"""Check the tensors of batches on the ranks, so that no rank trains on other data than was sampled.

invariants.py lists all checks."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TypeAlias

import torch

from megarl.batch import Batch
from megarl.invariants import InvariantError, digest_of_bytes

Digests: TypeAlias = dict[str, dict[int, int]]
"""Digests of samples' rows, by column and sample id. "tokens" is the digest of tokens and mask."""

_LARGEST_LOG_PROB = 1e-3
"""Largest log-prob that is accepted from an engine.

Samplers round, and log 1 may become slightly more than 0. The trainer's kernels never do that."""


def check_batch(batch: Batch, expected: Mapping[int, int | None], vocab_size: int) -> None:
    """Raise InvariantError if the batch that a rank is about to train on has other samples, tokens or masks
    than it should.

    Args:
        expected: sample id -> digest of the engine's tokens, or None if not known, of exactly the samples
            that this rank trains on.
    Raises: InvariantError naming the sample."""
    ids = batch.sample_ids.tolist()
    if sorted(ids) != sorted(expected):
        odd = min(
            set(ids) ^ expected.keys(),
            default=next((i for i, count in Counter(ids).items() if count > 1), None),
        )
        raise InvariantError(
            f"sample {odd} is here and should not be, or should be and is not: this rank has {len(ids)} "
            f"samples, and {len(expected)} are planned for it"
        )
    cu_seqlens = batch.cu_seqlens.tolist()
    if len(cu_seqlens) != len(ids) + 1 or cu_seqlens[0] != 0 or cu_seqlens[-1] != len(batch.tokens):
        raise InvariantError(
            f"cu_seqlens ({cu_seqlens[0]} ... {cu_seqlens[-1]}, {len(cu_seqlens)} of them) do not cover the "
            f"{len(batch.tokens)} tokens of {len(ids)} samples"
        )
    if len(batch.tokens) and not 0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < vocab_size:
        raise InvariantError(
            f"token ids {int(batch.tokens.min())} to {int(batch.tokens.max())} are not all in the "
            f"vocabulary of {vocab_size}"
        )
    mask, response_lengths = batch.response_mask, batch.response_lengths
    if len(ids) and bool((wrong := (response_lengths == 0) | mask[batch.cu_seqlens[:-1]]).any()):
        row = int(wrong.nonzero()[0])
        raise InvariantError(
            f"sample {ids[row]}: its mask covers {int(response_lengths[row])} of {int(batch.lengths[row])} "
            "tokens; it must cover a response, and not the first token, which nothing predicts"
        )
    for sample, found in zip(ids, _digests(batch), strict=True):
        if expected[sample] not in (None, found):
            raise InvariantError(
                f"sample {sample}: its tokens or its mask are not those that the engine made (digest "
                f"{found:08x}, made {expected[sample]:08x})"
            )
    if batch.rollout_log_probs is not None:
        check_column(batch, "rollout_log_probs", largest=_LARGEST_LOG_PROB)


def check_column(batch: Batch, name: str, largest: float = math.inf, may_be_nan: bool = False) -> None:
    """Raise InvariantError unless a column is finite and at most `largest` on response tokens, and 0
    elsewhere.

    Args:
        may_be_nan: for returns, which a sample without a reward lacks."""
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
            f"{name} of sample {int(batch.sample_ids[row])} is {float(column[at])} at position "
            f"{at - int(batch.cu_seqlens[row])}, a {kind} token; there it must be {rule}"
        )


def digests_of(batch: Batch, columns: Iterable[str]) -> Digests:
    """Return column -> sample id -> digest (32-bit hash) of the sample's rows in that column.

    Two samples have different digests even if their rows are equal."""
    return {name: _digests_of_column(batch, name) for name in columns}


def check_digests(
    batch: Batch, written: Mapping[str, Mapping[int, int]], how: str = "written for it"
) -> None:
    """Raise InvariantError if a sample's rows in a column no longer have the digest that was made when they
    were written.

    Args:
        written: digests of at least the samples of the batch, made when the columns were written.
        how: the end of the sentence "values of sample 5 are not those ...".
    Raises: InvariantError naming column and sample."""
    for name, expected in written.items():
        for sample, found in _digests_of_column(batch, name).items():
            if expected.get(sample) != found:
                made = f"{expected[sample]:08x}" if sample in expected else "none"
                raise InvariantError(
                    f"{name} of sample {sample} are not those {how}: digest {found:08x}, written {made}"
                )


def _digests_of_column(batch: Batch, name: str) -> dict[int, int]:
    ids = batch.sample_ids.tolist()
    if name == "tokens":
        return dict(zip(ids, _digests(batch), strict=True))
    column = getattr(batch, name)
    rows, width = memoryview(column.contiguous().flatten().view(torch.uint8).numpy()), column[:1].nbytes
    bounds = [width * position for position in batch.cu_seqlens.tolist()]
    return {
        sample: zlib.crc32(rows[begin:end], sample & 0xFFFFFFFF)
        for sample, begin, end in zip(ids, bounds, bounds[1:])
    }


def _digests(batch: Batch) -> Iterator[int]:
    """Yield one 32-bit hash per sample over its token ids and its mask. The mask may cover any tokens."""
    mask, num_sampled = batch.response_mask, batch.response_lengths
    contexts, sampled = (memoryview(batch.tokens[part].numpy()).cast("B") for part in (~mask, mask))
    num_context = 8 * (batch.lengths - num_sampled)
    at, end = 0, 0
    for context, of_sample, runs in zip(
        num_context.tolist(), (8 * num_sampled).tolist(), _runs(batch), strict=True
    ):
        yield digest_of_bytes(contexts[at : at + context], sampled[end : end + of_sample], runs)
        at, end = at + context, end + of_sample


def _runs(batch: Batch) -> Iterator[list[int]]:
    """Yield the lengths of each sample's runs of context and of sampled tokens in turn (`run_lengths`), or []
    if no context follows the sample's sampled tokens."""
    mask, cu_seqlens = batch.response_mask, batch.cu_seqlens.tolist()
    falls = torch.zeros_like(mask)  # the first token after each run of sampled tokens
    falls[1:] = mask[:-1] & ~mask[1:]
    falls[[start for start in cu_seqlens[:-1] if start < len(falls)]] = False
    for start, end, has_hole in zip(
        cu_seqlens, cu_seqlens[1:], (batch.tokens_per_sample(falls) > 0).tolist()
    ):
        if not has_hole:
            yield []
            continue
        of_sample = mask[start:end].tolist()
        runs = [len([*run]) for _, run in groupby(of_sample)]
        yield [0, *runs] if of_sample[0] else runs
