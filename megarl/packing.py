"""Which samples go through which forward pass on which rank, planned once for the whole mesh.

The driver plans with lengths only; no tensors here. Mini-batches (one optimizer update each) are drawn from *all* samples
of the step, so the same seed gives the same mini-batches under every layout. Inside a mini-batch, samples are spread over
the data-parallel ranks by cost and packed into micro-batches of at most `max_tokens`; every rank gets the same number of
micro-batches (some may be empty), so collectives line up and nothing is dropped."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """What the driver knows of one sample."""

    sample_id: int
    length: int
    """Tokens, prompt and response."""
    response_length: int
    holders: tuple[int, ...] = ()
    """Ranks that have the tokens."""
    truncated: bool = False
    """The response was cut at max_response_length."""


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer update. micro_batches[dp_rank][i] = sample ids of that rank's i-th forward pass."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    num_tokens: int
    """Response tokens over all ranks: a loss denominator."""
    num_sequences: int

    def samples_of(self, dp_rank: int) -> list[int]:
        return [s for micro in self.micro_batches[dp_rank] for s in micro]


def sequence_cost(length: int, hidden_size: int) -> int:
    """FLOPs of one sequence up to a constant: 24 h^2 per token of matrices and 4 h per pair of attention, in one layer."""
    return length * (6 * hidden_size + length)


def plan_mini_batches(samples: list[Sample], global_batch_size: int, homes: dict[int, int], dp_size: int, max_tokens: int,
                      hidden_size: int, seed: str | None) -> list[MiniBatch]:
    """Split the samples of a step into mini-batches of `global_batch_size` samples (the last may be smaller).

    Args:
        homes: sample id -> data-parallel rank that already has it; kept there unless the load would be uneven.
        seed: shuffles the samples before the split; None keeps their order.
    """
    order = list(samples)
    if seed is not None:
        random.Random(seed).shuffle(order)
    return [_plan_one(order[i : i + global_batch_size], homes, dp_size, max_tokens, hidden_size)
            for i in range(0, len(order), global_batch_size)]


def _plan_one(samples: list[Sample], homes: dict[int, int], dp_size: int, max_tokens: int, hidden_size: int) -> MiniBatch:
    shares = _balance(samples, homes, dp_size, hidden_size)
    packed = [_pack(share, max_tokens) for share in shares]
    count = max(len(p) for p in packed)
    micro_batches = tuple(tuple(p) + ((),) * (count - len(p)) for p in packed)
    return MiniBatch(micro_batches, sum(s.response_length for s in samples), len(samples))


def _balance(samples: list[Sample], homes: dict[int, int], dp_size: int, hidden_size: int) -> list[list[Sample]]:
    """Longest first to the least loaded rank, but to its home if that is not above its fair share."""
    fair = sum(sequence_cost(s.length, hidden_size) for s in samples) / dp_size
    loads, shares = [0] * dp_size, [[] for _ in range(dp_size)]
    for sample in sorted(samples, key=lambda s: (-s.length, s.sample_id)):
        cost = sequence_cost(sample.length, hidden_size)
        rank = homes.get(sample.sample_id)
        if rank is None or loads[rank] + cost > fair:
            rank = min(range(dp_size), key=lambda r: (loads[r], r))
        loads[rank] += cost
        shares[rank].append(sample)
    return shares


def _pack(samples: list[Sample], max_tokens: int) -> list[tuple[int, ...]]:
    """First fit, longest first. A sample longer than max_tokens gets a micro-batch of its own."""
    bins: list[list[int]] = []
    room: list[int] = []
    for sample in samples:
        fit = next((i for i, free in enumerate(room) if free >= sample.length), None)
        if fit is None:
            fit = len(bins)
            bins.append([])
            room.append(max_tokens)
        bins[fit].append(sample.sample_id)
        room[fit] -= sample.length
    return [tuple(b) for b in bins]


@dataclass(frozen=True)
class Move:
    """Copy one sample's columns from rank `source` to rank `destination`."""

    sample_id: int
    source: int
    destination: int


def plan_exchange(samples: list[Sample], destinations: dict[int, tuple[int, ...]]) -> list[Move]:
    """Moves that bring every sample to all ranks of `destinations[sample_id]` that do not hold it; holders take turns."""
    moves = []
    for sample in samples:
        for rank in destinations[sample.sample_id]:
            if rank not in sample.holders:
                moves.append(Move(sample.sample_id, sample.holders[rank % len(sample.holders)], rank))
    return moves
