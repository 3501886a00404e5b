"""What must hold of every step, checked at every step: cheap, and always on. A run that goes on after one of these fails trains on
something else than it sampled, and nothing else would say so.

    where                        what
    samples from the engines     every group is complete, every response has a token, ids are unique       check_samples
    plan of the updates          each sample is in exactly one mini-batch of an epoch, with all its tokens  check_plan
    batch on a training rank     the tokens are those that the engine made, the mask covers the response    check_batch
    scores                       each is finite, and of the response that was sampled                       check_scores
    columns of log-probs, ...    finite on response tokens, 0 elsewhere                                     check_column

A response is followed by its digest: made by the rank of the engine, compared by the ranks that train on it and by the driver."""

from __future__ import annotations

import math
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from megarl.batch import Batch
from megarl.packing import MiniBatch, Sample

_LARGEST_LOG_PROB = 1e-3  # samplers round: log 1 may come out as a little more than 0


class InvariantError(RuntimeError):
    """A step is not what it must be. The message names the invariant, the sample and what was found."""


def digest(prompt: Sequence[int], response: Sequence[int]) -> int:
    """32 bits of the token ids and of where the response begins. Example: digest([5, 6], [7]) != digest([5], [6, 7])."""
    return _digest(array("q", prompt).tobytes(), array("q", response).tobytes())


def _digest(prompt: bytes | memoryview, response: bytes | memoryview) -> int:
    return zlib.crc32(response, zlib.crc32(prompt, len(prompt)))


def _digests(tokens: torch.Tensor, mask: torch.Tensor, prompt_lengths: torch.Tensor, response_lengths: torch.Tensor) -> Iterator[int]:
    """Of each sample of a packed batch, whatever its mask covers."""
    prompts, responses = (memoryview(tokens[part].numpy()).cast("B") for part in (~mask, mask))
    at, end = 0, 0
    for prompt, response in zip((8 * prompt_lengths).tolist(), (8 * response_lengths).tolist()):
        yield _digest(prompts[at : at + prompt], responses[end : end + response])
        at, end = at + prompt, end + response


def check_samples(samples: Sequence[Sample], num_prompts: int, num_samples_per_prompt: int, max_length: int) -> None:
    """Of a whole step: every prompt has its group, and every response at least one token and no more than it may."""
    ids = Counter(s.sample_id for s in samples)
    if twice := [i for i, count in ids.items() if count > 1]:
        raise InvariantError(f"sample {twice[0]} was sampled more than once in this step")
    if lost := set(range(num_prompts * num_samples_per_prompt)) - ids.keys():
        raise InvariantError(f"{len(lost)} of {num_prompts} x {num_samples_per_prompt} samples are missing, the first is {min(lost)}, of prompt "
                             f"{min(lost) // num_samples_per_prompt}: groups must be complete")  # fmt: skip
    if strange := ids.keys() - set(range(num_prompts * num_samples_per_prompt)):
        raise InvariantError(f"sample {min(strange)} belongs to none of the {num_prompts} prompts of this step")
    for s in samples:
        if not 1 <= s.response_length < s.length <= max_length:
            raise InvariantError(f"sample {s.sample_id} has {s.response_length} response tokens of {s.length}: there must be at least one, after "
                                 f"a prompt, and at most {max_length} together")  # fmt: skip


def check_plan(mini_batches: Sequence[MiniBatch], samples: Sequence[Sample]) -> None:
    """Each sample is trained on once per epoch, and the losses are divided by all tokens that they sum over."""
    length_of = {s.sample_id: s.response_length for s in samples}
    planned = Counter(s for m in mini_batches for dp_rank in range(len(m.micro_batches)) for s in m.samples_of(dp_rank))
    if wrong := [s for s in length_of.keys() | planned.keys() if planned[s] != 1 or s not in length_of]:
        raise InvariantError(f"sample {min(wrong)} is planned {planned[min(wrong)]} times in an epoch: each sample of the step must be, once")
    for index, m in enumerate(mini_batches):
        members = [s for dp_rank in range(len(m.micro_batches)) for s in m.samples_of(dp_rank)]
        if (m.num_sequences, m.num_tokens) != (len(members), sum(length_of[s] for s in members)):
            raise InvariantError(f"mini-batch {index} has {len(members)} samples with {sum(length_of[s] for s in members)} response tokens, and "
                                 f"its loss would be divided for {m.num_sequences} with {m.num_tokens}")  # fmt: skip


def check_batch(batch: Batch, expected: Mapping[int, int | None], vocab_size: int) -> None:
    """What a rank is about to train on.

    Args:
        expected: sample id -> digest of what the engine made, of exactly the samples that this rank trains on; None: not known."""
    ids = batch.sample_ids.tolist()
    if sorted(ids) != sorted(expected):
        odd = min(set(ids) ^ expected.keys(), default=next((i for i, count in Counter(ids).items() if count > 1), None))
        raise InvariantError(f"sample {odd} is here and should not be, or should be and is not: this rank has {len(ids)} samples, "
                             f"and {len(expected)} are planned for it")  # fmt: skip
    cu_seqlens = batch.cu_seqlens.tolist()
    if len(cu_seqlens) != len(ids) + 1 or cu_seqlens[0] != 0 or cu_seqlens[-1] != len(batch.tokens):
        raise InvariantError(f"cu_seqlens ({cu_seqlens[0]} ... {cu_seqlens[-1]}, {len(cu_seqlens)} of them) do not cover the "
                             f"{len(batch.tokens)} tokens of {len(ids)} samples")  # fmt: skip
    if len(batch.tokens) and not 0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < vocab_size:
        raise InvariantError(f"token ids {int(batch.tokens.min())} to {int(batch.tokens.max())} are not all in the vocabulary of {vocab_size}")
    mask, response_lengths = batch.response_mask, batch.response_lengths
    if len(ids) and bool((wrong := (response_lengths == 0) | mask[batch.cu_seqlens[:-1]]).any()):
        row = int(wrong.nonzero()[0])
        raise InvariantError(f"sample {ids[row]}: its mask covers {int(response_lengths[row])} of {int(batch.lengths[row])} tokens; it must cover a "
                             "response, and not the first token, which nothing predicts")  # fmt: skip
    for sample, found in zip(ids, _digests(batch.tokens, mask, batch.lengths - response_lengths, response_lengths), strict=True):
        if expected[sample] not in (None, found):
            raise InvariantError(f"sample {sample}: its tokens or its mask are not those that the engine made (digest {found:08x}, made "
                                 f"{expected[sample]:08x})")  # fmt: skip
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
        rule = "finite" + (f" and at most {largest:g}" if largest < math.inf else "") if kind == "response" else "0"
        raise InvariantError(f"{name} of sample {int(batch.sample_ids[row])} is {float(column[at])} at position {at - int(batch.cu_seqlens[row])}, a "
                             f"{kind} token; there it must be {rule}")  # fmt: skip


def check_scores(role: str, records: Iterable[Mapping[str, object]], samples: Sequence[Sample]) -> None:
    """Every sample is scored once, each score is a finite number or None, and the text that was judged is the one that was sampled."""
    digest_of, seen = {s.sample_id: s.digest for s in samples}, Counter()
    for record in records:
        sample = record["sample_id"]
        seen[sample] += 1
        score = record.get("reward", record.get("score"))
        if score is not None and not math.isfinite(score):
            raise InvariantError(f"{role} says {score} of sample {sample}: a score must be finite, or None where it failed")
        if None not in (digest_of.get(sample), judged := record.get("digest")) and judged != digest_of[sample]:
            raise InvariantError(f"{role} has judged another response than sample {sample}'s (digest {judged:08x}, sampled {digest_of[sample]:08x})")
    if wrong := [s for s in seen.keys() | digest_of.keys() if seen[s] != 1 or s not in digest_of]:
        raise InvariantError(f"{role} has scored sample {min(wrong)} {seen[min(wrong)]} times: each sample of the step must be, once")
