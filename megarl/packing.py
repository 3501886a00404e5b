"""Plan which rank trains on which samples, and which rank sends which sample where.

The plan uses lengths and ids only, no tensors. Mini-batches (one optimizer update each) are drawn from *all*
episodes of the step, so the same seed gives the same mini-batches on every mesh. An episode is one sample, or
several if its conversation has branches, which share a mini-batch. Inside a mini-batch, samples are spread
over the data-parallel ranks by cost and packed into micro-batches of at most `max_tokens`. Every rank gets
the same number of micro-batches, so collectives line up and nothing is dropped. A rank with fewer samples
gets empty micro-batches: a forward pass whose loss is a sum of no terms.

The driver plans once per mesh. Each rank derives its own messages from the plans (`plan_route`)."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import pairwise

_BRANCH_STRIDE = 1 << 40
"""Difference between the ids of two samples of one episode. A run has fewer episodes."""
MAX_BRANCHES = 1 << 12
"""Most samples of an episode, so that ids stay below 2^53, which JSON's readers can hold."""


@dataclass(frozen=True)
class Sample:
    """The driver's record of one sample: ids and lengths. The tokens of the sample stay on the ranks.

    Example: the second of three answers to the prompt of visit 4, sampled by the first weights, on rank 1:
        Sample(sample_id=13, length=90, response_length=70, owners=(1,), group=4, version=0)"""

    sample_id: int
    length: int
    """Number of all tokens: prompt and response, in a multi-turn sample with the environment's messages."""
    response_length: int
    """Number of sampled tokens, which are the tokens that are trained on."""
    owners: tuple[int, ...] = ()
    """Ranks that hold the tokens as the engine made them."""
    truncated: bool = False
    """True if the response was cut at max_response_length."""
    digest: int | None = None
    """Digest of the tokens, see `megarl.invariants.digest`. None if no digest was made."""
    group: int = -1
    """Number of the group that the sample belongs to, or -1 if there are no groups (SFT).

    Samples of one group answer the same prompt, and are compared with each other. Any number of samples may
    have the same group. The rollout role uses the visit of the prompt as the number."""
    version: int = -1
    """Version of the weights that sampled the first response token, the oldest one; -1 if no engine did
    (SFT)."""
    version_runs: tuple[tuple[int, int], ...] = ()
    """(version, number of consecutive response tokens that its weights sampled), from the first token to the
    last; empty if all tokens are of `version`."""
    trained: bool = True
    """False for a sample that is scored but not trained on, such as a canary. No loss denominator counts
    it."""
    branch: int = 0
    """Number of the sample among those of its episode."""
    num_branches: int = 1
    """Number of samples of the episode. Each sampled token of an episode is a response token of exactly one
    of them."""

    @property
    def episode(self) -> int:
        """Id of the episode, which is that of its first sample."""
        return self.sample_id - self.branch * _BRANCH_STRIDE

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The `version_runs` of the sample, with one entry where a single version sampled all tokens."""
        return self.version_runs or ((self.version, self.response_length),)

    def tokens_of(self, version: int) -> int:
        """Return how many response tokens the weights of a version sampled."""
        return sum(count for one, count in self.runs if one == version)


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer update, as a plan: which rank runs which samples in which forward pass.

    micro_batches[dp_rank][i] holds the sample ids of that rank's i-th forward pass."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    num_tokens: int
    """Number of response tokens that are trained on, on all ranks, a loss denominator."""
    num_sequences: int
    """Number of episodes that are trained on, on all ranks."""

    def samples_of(self, dp_rank: int) -> list[int]:
        return [s for micro in self.micro_batches[dp_rank] for s in micro]


def branch_id(episode: int, branch: int) -> int:
    """Return the id of a sample of an episode. The first sample has the id of the episode."""
    return episode + branch * _BRANCH_STRIDE


def by_episode(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    """Return episode -> its samples, both in the order in which they come."""
    found: dict[int, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.episode, []).append(sample)
    return found


def run_lengths(prompt_length: int, response_length: int, holes: Sequence[tuple[int, int]]) -> list[int]:
    """Return the lengths of a sample's runs of tokens: context and sampled tokens in turn, from the prompt to
    the last run of sampled tokens.

    Args:
        response_length: number of all tokens after the prompt.
        holes: (start, end) of every run of tokens after the prompt that was not sampled, counted from the end
            of the prompt."""
    bounds = [-prompt_length, 0, *(bound for hole in holes for bound in hole), response_length]
    return [end - start for start, end in pairwise(bounds)]


def sequence_cost(length: int, hidden_size: int) -> int:
    """Return the FLOPs of one sequence, up to a factor that is the same for all lengths.

    In one layer these are 24 h^2 per token for the matrices and 4 h per pair of tokens for attention."""
    return length * (6 * hidden_size + length)


def preferred_ranks(samples: Sequence[Sample], replicas: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """Return sample id -> data-parallel rank that already holds the sample's tokens, so that they need not be
    sent.

    A sample that no rank of the mesh owns is left out. If several replicas own a sample (an engine spans
    them), they take turns.

    Args:
        replicas: ranks of each data-parallel replica; see `config.mesh.replicas`.
    Returns: sample id -> data-parallel rank."""
    replica_of = {rank: dp_rank for dp_rank, ranks in enumerate(replicas) for rank in ranks}
    candidates_of: dict[tuple[int, ...], list[int]] = {}  # owners -> the replicas that contain them
    preferred: dict[int, int] = {}
    turns: Counter[tuple[int, ...]] = Counter()
    for sample in samples:
        owners = sample.owners
        if owners not in candidates_of:
            candidates_of[owners] = sorted({replica_of[rank] for rank in owners if rank in replica_of})
        if candidates := candidates_of[owners]:
            preferred[sample.sample_id] = candidates[turns[owners] % len(candidates)]
            turns[owners] += 1
    return preferred


def plan_mini_batches(
    samples: Sequence[Sample],
    global_batch_size: int,
    preferred: Mapping[int, int],
    dp_size: int,
    max_tokens: int,
    hidden_size: int,
    seed: str | None,
) -> list[MiniBatch]:
    """Return the samples of a step as mini-batches of `global_batch_size` episodes (the last may be smaller),
    spread over ranks and micro-batches.

    No data-parallel rank gets more than its fair part of a mini-batch's cost plus 1 - 1 / dp_size of the
    costliest sample.

    Args:
        preferred: sample id -> data-parallel rank that already has the sample. The sample stays there unless
            the load would be uneven.
        max_tokens: limit of a micro-batch. A longer sample gets a micro-batch of its own.
        seed: shuffles the episodes before the split; None keeps their order."""
    order = list(by_episode(samples).values())
    if seed is not None:
        random.Random(seed).shuffle(order)
    parts = [order[i : i + global_batch_size] for i in range(0, len(order), global_batch_size)]
    return [
        _plan_one([s for of_one in part for s in of_one], preferred, dp_size, max_tokens, hidden_size)
        for part in parts
    ]


def _plan_one(
    samples: list[Sample], preferred: Mapping[int, int], dp_size: int, max_tokens: int, hidden_size: int
) -> MiniBatch:
    packed = [_pack(of_rank, max_tokens) for of_rank in _balance(samples, preferred, dp_size, hidden_size)]
    count = max(len(bins) for bins in packed)
    micro_batches = tuple(
        tuple(tuple(s.sample_id for s in micro) for micro in _split_up(bins, count)) for bins in packed
    )
    trained = [s for s in samples if s.trained]
    num_episodes = len({s.episode for s in trained})
    return MiniBatch(micro_batches, sum(s.response_length for s in trained), num_episodes)


def _balance(
    samples: list[Sample], preferred: Mapping[int, int], dp_size: int, hidden_size: int
) -> list[list[Sample]]:
    """Return the samples of each data-parallel rank: longest first, each given to the least loaded rank.

    A sample goes to its preferred rank if the load of that rank stays fair."""
    fair = sum(sequence_cost(s.length, hidden_size) for s in samples) / dp_size
    loads = [0] * dp_size
    samples_of: list[list[Sample]] = [[] for _ in range(dp_size)]
    # A heap of (load, rank). An entry with an outdated load is renewed when it reaches the top.
    least = [(0, rank) for rank in range(dp_size)]
    for sample in sorted(samples, key=lambda s: (-s.length, s.sample_id)):
        cost = sequence_cost(sample.length, hidden_size)
        rank = preferred.get(sample.sample_id)
        if rank is None or loads[rank] + cost > fair:
            while least[0][0] != loads[least[0][1]]:
                heapreplace(least, (loads[least[0][1]], least[0][1]))
            rank = least[0][1]
        loads[rank] += cost
        samples_of[rank].append(sample)
    return samples_of


def _pack(samples: list[Sample], max_tokens: int) -> list[list[Sample]]:
    """Return micro-batches of at most `max_tokens`, or of one longer sample. Every sample goes into the one
    with the least sufficient room, or a new one."""
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
    """Return `count` micro-batches: the largest are split in two, and empty ones are added if none can be
    split.

    Two halves cost less than a full micro-batch and an empty one."""
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
    """Return sample id -> the ranks that train on it: those of one data-parallel replica, from `replicas`.

    Raises: ValueError for a repeated sample, or for mini-batches that were planned for another number of
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
    """The samples that one rank sends to, and receives from, each other rank. Both ends list the samples in
    the same order."""

    outgoing: dict[int, list[int]] = field(default_factory=dict)
    """Maps each destination rank to sample ids."""
    incoming: dict[int, list[int]] = field(default_factory=dict)
    """Maps each source rank to sample ids."""

    def reads(self, wanted: Iterable[int]) -> list[int]:
        """Return the wanted samples that no other rank sends to this rank, then the samples that this rank
        sends: it must hold all of them."""
        received = {sample for ids in self.incoming.values() for sample in ids}
        kept = [sample for sample in wanted if sample not in received]
        return [*kept, *(sample for ids in self.outgoing.values() for sample in ids)]


def plan_route(
    rank: int, owners: Mapping[int, tuple[int, ...]], destinations: Mapping[int, tuple[int, ...]]
) -> Route:
    """Return the messages that this rank sends and receives, so that every sample reaches the ranks in
    `destinations[sample]`.

    A destination that is among `owners[sample]` needs no message. Every rank plans for itself. All ranks find
    the same messages if they pass the same samples in the same order. Ranks that own the same samples take
    turns at sending, so the numbers of samples they send differ by one at most.

    Raises: KeyError or ZeroDivisionError for a sample of `destinations` that no rank owns; check it
        before."""
    route, turns = Route(), Counter()
    # (owners, destinations) -> destinations that are not owners
    missing: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}
    for sample, wanted_by in destinations.items():
        held_by = owners[sample]
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
