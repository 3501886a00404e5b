"""Move samples between ranks: from the ranks that made them to the ranks that train on them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarl.batch import Batch
from megarl.packing import Move, Sample


def exchange(batch: Batch | None, moves: list[Move], samples: list[Sample], wanted: list[int]) -> Batch:
    """This rank's `wanted` samples, in that order; missing ones come from their sources as one message per pair of ranks.

    Args:
        batch: what this rank holds now (None: nothing).
        moves: the plan for all ranks. Every rank named in a move calls; others may.
        samples: all samples of the step; receivers size their buffers with it.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    length_of = {s.sample_id: s.length for s in samples}
    outgoing, incoming, operations = {}, {}, []
    for move in moves:
        if move.source == rank:
            outgoing.setdefault(move.destination, []).append(move.sample_id)
        elif move.destination == rank:
            incoming.setdefault(move.source, []).append(move.sample_id)
    for peer, ids in outgoing.items():
        operations.append(dist.P2POp(dist.isend, _to_bytes(batch.select_samples(ids)), peer))
    buffers = {}
    for peer, ids in incoming.items():
        lengths = [length_of[i] for i in ids]
        buffers[peer] = torch.empty(sum(lengths) * _BYTES_PER_TOKEN, dtype=torch.uint8)
        operations.append(dist.P2POp(dist.irecv, buffers[peer], peer))
    if operations:
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    received = [_from_bytes(buffers[peer], ids, [length_of[i] for i in ids]) for peer, ids in incoming.items()]
    held = Batch.from_samples([], [], [], []) if batch is None else batch
    return Batch.cat([held, *received]).select_samples(wanted)


_BYTES_PER_TOKEN = 8 + 4 + 1  # token, rollout log-prob, mask


def _to_bytes(batch: Batch) -> torch.Tensor:
    """Column after column, widest first, so that every column is aligned when it is viewed in place."""
    return torch.cat([batch.tokens.view(torch.uint8), batch.rollout_log_probs.view(torch.uint8), batch.response_mask.view(torch.uint8)])


def _from_bytes(data: torch.Tensor, ids: list[int], lengths: list[int]) -> Batch:
    num_tokens = sum(lengths)
    tokens, log_probs, mask = data.split([8 * num_tokens, 4 * num_tokens, num_tokens])
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return Batch(torch.tensor(ids, dtype=torch.int64), tokens.view(torch.int64), cu_seqlens, mask.view(torch.bool),
                 rollout_log_probs=log_probs.view(torch.float32))
