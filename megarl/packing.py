"""Which samples go through which forward pass on which rank, and which rank sends which sample where.

Lengths and ids only; no tensors here. Mini-batches (one optimizer update each) are drawn from *all* samples
of the step, so the same seed gives the same mini-batches on every mesh. Inside a mini-batch, samples are
spread over the data-parallel ranks by cost and packed into micro-batches of at most `max_tokens`; every rank
gets the same number of micro-batches, so collectives line up and nothing is dropped. A rank with fewer
samples than that gets empty ones: a forward pass whose loss is a sum of no terms.

The driver plans once per mesh; from the plans each rank works out its own messages (`plan_route`)."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace


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
    digest: int | None = None
    """Of its tokens, see `megarl.invariants.digest`; None: nobody has made one."""
    group: int = 0
    """Visit of the prompt that it answers: samples of one group are compared with each other."""


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
    """FLOPs of one sequence up to a constant: 24 h^2 per token of matrices and 4 h per pair of attention, in
    one layer."""
    return length * (6 * hidden_size + length)


def homes_of(samples: Sequence[Sample], replicas: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """Sample id -> data-parallel rank of which some rank holds the sample. Samples that no rank of the mesh
    holds are left out.

    Where several replicas hold a sample (an engine spans them), they take turns.

    Args:
        replicas: ranks of each data-parallel replica; see `config.mesh.replicas`."""
    replica_of = {rank: dp_rank for dp_rank, ranks in enumerate(replicas) for rank in ranks}
    near: dict[tuple[int, ...], list[int]] = {}  # holders -> the replicas they are in
    homes: dict[int, int] = {}
    turns: Counter[tuple[int, ...]] = Counter()
    for sample in samples:
        holders = sample.holders
        if holders not in near:
            near[holders] = sorted({replica_of[rank] for rank in holders if rank in replica_of})
        if candidates := near[holders]:
            homes[sample.sample_id] = candidates[turns[holders] % len(candidates)]
            turns[holders] += 1
    return homes


def plan_mini_batches(
    samples: Sequence[Sample],
    global_batch_size: int,
    homes: Mapping[int, int],
    dp_size: int,
    max_tokens: int,
    hidden_size: int,
    seed: str | None,
) -> list[MiniBatch]:
    """Split the samples of a step into mini-batches of `global_batch_size` samples (the last may be smaller).

    No data-parallel rank gets more than its fair part of a mini-batch's cost plus 1 - 1 / dp_size of the
    costliest sample.

    Args:
        homes: sample id -> data-parallel rank that already has it; kept there unless the load would be
            uneven.
        max_tokens: of a micro-batch. A longer sample gets a micro-batch of its own.
        seed: shuffles the samples before the split; None keeps their order.
    Raises: ValueError for a size below 1 or a sample id that comes twice."""
    for name, size in (
        ("global_batch_size", global_batch_size),
        ("dp_size", dp_size),
        ("max_tokens", max_tokens),
    ):
        if size < 1:
            raise ValueError(f"{name} ({size}) must be at least 1.")
    if twice := [i for i, count in Counter(s.sample_id for s in samples).items() if count > 1]:
        raise ValueError(
            f"sample_id ({twice[0]}) comes more than once among the samples of the step. Ids must "
            "be unique in it."
        )
    order = list(samples)
    if seed is not None:
        random.Random(seed).shuffle(order)
    return [
        _plan_one(order[i : i + global_batch_size], homes, dp_size, max_tokens, hidden_size)
        for i in range(0, len(order), global_batch_size)
    ]


def _plan_one(
    samples: list[Sample], homes: Mapping[int, int], dp_size: int, max_tokens: int, hidden_size: int
) -> MiniBatch:
    packed = [_pack(share, max_tokens) for share in _balance(samples, homes, dp_size, hidden_size)]
    count = max(len(bins) for bins in packed)
    micro_batches = tuple(
        tuple(tuple(s.sample_id for s in micro) for micro in _split_up(bins, count)) for bins in packed
    )
    return MiniBatch(micro_batches, sum(s.response_length for s in samples), len(samples))


def _balance(
    samples: list[Sample], homes: Mapping[int, int], dp_size: int, hidden_size: int
) -> list[list[Sample]]:
    """Longest first to the least loaded rank, but to its home if that is not above its fair share."""
    fair = sum(sequence_cost(s.length, hidden_size) for s in samples) / dp_size
    loads, shares = [0] * dp_size, [[] for _ in range(dp_size)]
    least = [
        (0, rank) for rank in range(dp_size)
    ]  # a heap of (load, rank); an entry with a load of before is renewed when it comes up
    for sample in sorted(samples, key=lambda s: (-s.length, s.sample_id)):
        cost = sequence_cost(sample.length, hidden_size)
        rank = homes.get(sample.sample_id)
        if rank is None or loads[rank] + cost > fair:
            while least[0][0] != loads[least[0][1]]:
                heapreplace(least, (loads[least[0][1]], least[0][1]))
            rank = least[0][1]
        loads[rank] += cost
        shares[rank].append(sample)
    return shares


def _pack(samples: list[Sample], max_tokens: int) -> list[list[Sample]]:
    """Best fit of samples that come longest first: each to the micro-batch where the least room stays, or to
    a new one."""
    bins: list[list[Sample]] = []
    room: list[tuple[int, int]] = []  # ascending (free tokens, index in bins)
    for sample in samples:
        at = bisect_left(room, (sample.length, 0))
        if at < len(room):
            free, fit = room.pop(at)
        else:
            free, fit = max_tokens, len(bins)
            bins.append([])
        bins[fit].append(sample)
        insort(room, (free - sample.length, fit))
    return bins


def _split_up(bins: list[list[Sample]], count: int) -> list[list[Sample]]:
    """`count` micro-batches: halves the largest ones, which costs less than empty ones beside them; empty
    ones where all are single."""
    bins = list(bins)
    largest = [(-sum(s.length for s in micro), index) for index, micro in enumerate(bins) if len(micro) > 1]
    heapify(largest)
    while len(bins) < count and largest:
        _, index = heappop(largest)
        halves = bins[index][0::2], bins[index][1::2]
        bins[index] = halves[0]
        bins.append(halves[1])
        for half, at in zip(halves, (index, len(bins) - 1), strict=True):
            if len(half) > 1:
                heappush(largest, (-sum(s.length for s in half), at))
    return bins + [[]] * (count - len(bins))


def ranks_of_samples(
    mini_batches: Iterable[MiniBatch], replicas: Sequence[tuple[int, ...]]
) -> dict[int, tuple[int, ...]]:
    """Sample id -> the ranks that `replicas` names for the data-parallel rank whose forward passes it goes
    through.

    Raises: ValueError for a sample that comes twice, or mini-batches that were planned for another number of
    data-parallel ranks."""
    out: dict[int, tuple[int, ...]] = {}
    for mini_batch in mini_batches:
        if len(mini_batch.micro_batches) != len(replicas):
            raise ValueError(
                f"mini-batches are planned for {len(mini_batch.micro_batches)} data-parallel ranks, "
                f"the mesh has {len(replicas)}."
            )
        for dp_rank, ranks in enumerate(replicas):
            for sample in mini_batch.samples_of(dp_rank):
                if sample in out:
                    raise ValueError(f"sample {sample} comes twice in the mini-batches.")
                out[sample] = ranks
    return out


@dataclass(frozen=True)
class Route:
    """What one rank sends and gets. Both ends of a message list its samples in the same order."""

    outgoing: dict[int, list[int]] = field(default_factory=dict)
    """Destination rank -> sample ids."""
    incoming: dict[int, list[int]] = field(default_factory=dict)
    """Source rank -> sample ids."""


def plan_route(
    rank: int, holders: Mapping[int, tuple[int, ...]], destinations: Mapping[int, tuple[int, ...]]
) -> Route:
    """This rank's part of bringing every sample to all ranks of `destinations[sample]` that are not among
    `holders[sample]`.

    Every rank plans for itself and all come to the same messages, as long as they pass the same samples in
    the same order. Ranks that hold the same samples take turns at sending, so the numbers of samples they
    send differ by one at most.

    Raises: KeyError or ZeroDivisionError for a sample of `destinations` that nobody holds; check it
    before."""
    route, turns = Route(), Counter()
    missing: dict[
        tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]
    ] = {}  # (holders, destinations) -> destinations without it
    for sample, wanted_by in destinations.items():
        held_by = holders[sample]
        if (held_by, wanted_by) not in missing:
            missing[held_by, wanted_by] = tuple(r for r in wanted_by if r not in held_by)
        without = missing[held_by, wanted_by]
        turn = turns[held_by]
        turns[held_by] += len(without)
        if rank in held_by:
            for j, destination in enumerate(without):
                if held_by[(turn + j) % len(held_by)] == rank:
                    route.outgoing.setdefault(destination, []).append(sample)
        elif rank in without:
            source = held_by[(turn + without.index(rank)) % len(held_by)]
            route.incoming.setdefault(source, []).append(sample)
    return route
