"""Check at every step that training uses exactly the samples that were sampled.

The checks are cheap and always on. Nothing else would report that a run trains on other data than it sampled.

    where                        invariant
    samples from the engines     every group and every episode is complete, every response has a token, ids
                                 are unique
    versions of the weights      they never decrease within a response, and none is newer than the weights
                                 that are trained, or older than --staleness allows (if it is above 0)
    samples before sending       group and weight versions are those that the engine's rank recorded
    plan of the updates          each sample is in exactly one mini-batch of an epoch, with all its tokens and
                                 the other samples of its episode
    batch on a training rank     the tokens are those that the engine made, the mask covers the sampled ones
    scores                       each is finite, and of the response that was sampled
    rewards                      each is the weighted sum of its own sample's scores
    rewards on a training rank   each is that of the sample with these tokens
    advantages                   some samples of each rank equal those of the algorithm's reference
    columns                      every sample has the rows that were written for it, also on another mesh
    columns of log-probs, ...    finite on response tokens, 0 elsewhere

The checks of these rows are, in this order: check_samples, check_versions, workers.store, check_plan,
batch_invariants.check_batch, check_scores, check_rewards, check_reward_digests, workers.recompute,
batch_invariants.check_digests, batch_invariants.check_column.

Every response has a digest. The engine's rank makes the digest, and the driver and the ranks that train on
the response compare it. Every column also has a digest per sample, which is made where the column is written
and compared wherever the column is read."""

from __future__ import annotations

import math
import struct
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from megarl.failures import ExplainedError
from megarl.packing import MiniBatch, Sample, by_episode, run_lengths


LARGEST_FLOAT32 = 3.4028234663852886e38
"""Largest number that float32 holds.

Rewards are Python floats until the advantages are computed in float32."""


class InvariantError(ExplainedError, RuntimeError):
    """Raised if a step breaks an invariant, e.g. trains on other data than was sampled. The message names the
    sample and what was found."""

    read_on = "docs/debugging.md, section A step is not what it must be"


class NonFiniteUpdate(ExplainedError, FloatingPointError):
    """Raised, on all ranks of the model, for an update whose loss or gradient is not finite on some rank.

    All ranks of the mesh raise the error with the same message. Weights, moments and step counts are then as
    they were before the update."""

    read_on = "docs/debugging.md, section A loss or gradient is not finite"


def digest(prompt: Sequence[int], response: Sequence[int], holes: Sequence[tuple[int, int]] = ()) -> int:
    """Return a 32-bit hash of a sample's token ids and of which of them were sampled.

    Example: digest([5, 6], [7]) != digest([5], [6, 7]).

    Args:
        holes: (start, end) in the response of the tokens that were not sampled."""
    context, sampled, end = [*prompt], [], 0
    for hole in holes:
        sampled += response[end : hole[0]]
        context += response[hole[0] : hole[1]]
        end = hole[1]
    sampled += response[end:]
    runs = run_lengths(len(prompt), len(response), holes)
    return digest_of_bytes(array("q", context).tobytes(), array("q", sampled).tobytes(), runs)


def digest_of_bytes(
    context: bytes | memoryview, sampled: bytes | memoryview, runs: Sequence[int] = ()
) -> int:
    """Return the same hash as `digest`, from the memory of int64 token ids.

    Args:
        runs: lengths of the runs of context and sampled tokens, in turn. A sample with one run of each may
            leave it out."""
    found = zlib.crc32(sampled, zlib.crc32(context, len(context)))
    return found if len(runs) <= 2 else zlib.crc32(array("q", runs).tobytes(), found)


def digest_of_reward(sample: int, group: int, reward: float | None, tokens: int) -> int:
    """Return a 32-bit hash over a sample's id, group and reward and over the digest `tokens` of its
    tokens."""
    return zlib.crc32(struct.pack("<qqdq", sample, group, math.nan if reward is None else reward, tokens))


def check_samples(samples: Sequence[Sample], group_sizes: Mapping[int, int], max_length: int) -> None:
    """Raise InvariantError if a group or an episode of the step is incomplete, a sample id repeats, or a
    length is not allowed.

    Args:
        group_sizes: number of episodes that each group must have. Groups may have different sizes.
    Raises: InvariantError naming the sample or the group."""
    ids = Counter(s.sample_id for s in samples)
    if twice := [i for i, count in ids.items() if count > 1]:
        raise InvariantError(f"sample {twice[0]} was sampled more than once in this step")
    if strange := [s for s in samples if s.group not in group_sizes]:
        raise InvariantError(
            f"sample {strange[0].sample_id} belongs to group {strange[0].group}, which is none of the "
            f"{len(group_sizes)} groups of this step"
        )
    episodes = by_episode(samples)
    found = Counter(of_one[0].group for of_one in episodes.values())
    if wrong := [group for group, size in group_sizes.items() if found[group] != size]:
        raise InvariantError(
            f"group {wrong[0]} has {found[wrong[0]]} of {group_sizes[wrong[0]]} samples, and {len(wrong)} of "
            f"{len(group_sizes)} groups have another number than they must: groups must be complete"
        )
    for episode, of_one in episodes.items():
        shared = {(s.num_branches, s.group, s.truncated, s.trained) for s in of_one}
        if shared != {(len(of_one), of_one[0].group, of_one[0].truncated, of_one[0].trained)}:
            raise InvariantError(
                f"episode {episode} has {len(of_one)} samples here, and they say {sorted(shared)} of their number, "
                "group, truncation and training: an episode must come whole, in one group"
            )
    for s in samples:
        if not 1 <= s.response_length < s.length <= max_length:
            raise InvariantError(
                f"sample {s.sample_id} has {s.response_length} response tokens of {s.length}: there must be "
                f"at least one, after a prompt, and at most {max_length} together"
            )


def check_versions(samples: Iterable[Sample], step: int, staleness: int) -> None:
    """Raise InvariantError if a response token was sampled by weights that are newer than those that the step
    trains, or older than --staleness allows, or newer than the weights that sampled a later token.

    Args:
        step: number of the step, which trains the weights of version step - 1.
        staleness: --staleness, the largest accepted age in versions."""
    for s in samples:
        versions = [version for version, _ in s.runs]
        for before, after in pairwise(versions):
            if before >= after:
                raise InvariantError(
                    f"sample {s.sample_id}: version {before} of the weights sampled a token before version "
                    f"{after} did: versions must not decrease within a response"
                )
        if (count := sum(count for _, count in s.runs)) != s.response_length:
            raise InvariantError(
                f"sample {s.sample_id} has {s.response_length} response tokens, and {count} versions of weights "
                "that sampled them"
            )
        if not 0 <= versions[0] <= versions[-1] < step:
            raise InvariantError(
                f"sample {s.sample_id} was sampled by versions {versions[0]} to {versions[-1]} of the weights, "
                f"and step {step} trains version {step - 1}: they must be from 0 to {step - 1}"
            )
        if (age := step - 1 - versions[0]) > staleness:
            raise InvariantError(
                f"sample {s.sample_id} has a token that version {versions[0]} of the weights sampled, and step "
                f"{step} trains version {step - 1}: it is {age} versions old, and --staleness is {staleness}"
            )


def check_reward_sizes(rewards: Mapping[int, float | None]) -> None:
    """Raise ValueError for a reward that is NaN, infinite or too large for float32. None, a failed reward, is
    allowed.

    Scores are finite, but weights and the user's loop have changed the rewards since.

    Args:
        rewards: sample id -> reward, or None if the reward failed."""
    for sample, reward in rewards.items():
        if reward is not None and not abs(reward) <= LARGEST_FLOAT32:
            raise ValueError(
                f"reward of sample {sample} ({reward}): must be a number that float32 holds (at most "
                f"{LARGEST_FLOAT32:.2g} in size), or None, a reward that failed. What made it: "
                "--reward-model-weights, or a change of batch.rewards?"
            )


def check_plan(mini_batches: Sequence[MiniBatch], samples: Sequence[Sample], max_tokens: int) -> None:
    """Raise InvariantError unless each sample is in one mini-batch, and the mini-batches' counts, by which
    losses are divided, are right.

    No micro-batch of several samples may have more than `max_tokens` tokens."""
    num_tokens = {s.sample_id: s.length for s in samples}
    length_of = {s.sample_id: s.response_length for s in samples}
    untrained = {s.sample_id for s in samples if not s.trained}
    planned = Counter(
        s for m in mini_batches for dp_rank in range(len(m.micro_batches)) for s in m.samples_of(dp_rank)
    )
    if wrong := [s for s in length_of.keys() | planned.keys() if planned[s] != 1 or s not in length_of]:
        raise InvariantError(
            f"sample {min(wrong)} is planned {planned[min(wrong)]} times in an epoch: each sample of the "
            "step must be, once"
        )
    episode_of, place_of = {s.sample_id: s.episode for s in samples}, {}
    for index, m in enumerate(mini_batches):
        every = [s for dp_rank in range(len(m.micro_batches)) for s in m.samples_of(dp_rank)]
        members = [s for s in every if s not in untrained]
        if split := [s for s in every if place_of.setdefault(episode_of[s], index) != index]:
            first = place_of[episode_of[split[0]]]
            raise InvariantError(
                f"episode {episode_of[split[0]]} has samples in mini-batches {first} and {index}: they must share "
                "one, or the episode would count twice"
            )
        num_episodes, num_response = len({episode_of[s] for s in members}), sum(length_of[s] for s in members)
        if (m.num_sequences, m.num_tokens) != (num_episodes, num_response):
            raise InvariantError(
                f"mini-batch {index} has {num_episodes} samples with {num_response} response tokens, and its loss "
                f"would be divided as for {m.num_sequences} samples with {m.num_tokens} tokens"
            )
        for micro in (micro for of_rank in m.micro_batches for micro in of_rank if len(micro) > 1):
            if (size := sum(num_tokens[s] for s in micro)) > max_tokens:
                raise InvariantError(
                    f"a micro-batch of mini-batch {index} has {len(micro)} samples with {size} tokens, and "
                    f"--max-tokens-per-micro-batch is {max_tokens}"
                )


def check_scores(role: str, records: Iterable[Mapping[str, object]], samples: Sequence[Sample]) -> None:
    """Raise InvariantError unless each sample has one score, which is None or finite in float32 and belongs
    to its sampled text."""
    digest_of, seen = {s.sample_id: s.digest for s in samples}, Counter()
    for record in records:
        sample = record["sample_id"]
        seen[sample] += 1
        score = record.get("reward", record.get("score"))
        if score is not None and not abs(score) <= LARGEST_FLOAT32:
            raise InvariantError(
                f"{role} says {score} of sample {sample}: a score must be finite in float32, or None "
                "where it failed"
            )
        if (
            None not in (digest_of.get(sample), judged := record.get("digest"))
            and judged != digest_of[sample]
        ):
            raise InvariantError(
                f"{role} has judged another response than sample {sample}'s (digest {judged:08x}, sampled "
                f"{digest_of[sample]:08x})"
            )
    if wrong := [s for s in seen.keys() | digest_of.keys() if seen[s] != 1 or s not in digest_of]:
        raise InvariantError(
            f"{role} has scored sample {min(wrong)} {seen[min(wrong)]} times: each sample of the "
            "step must be, once"
        )


def check_rewards(
    rewards: Mapping[int, float | None], scores: Sequence[tuple[float, Mapping[int, float | None]]]
) -> None:
    """Raise InvariantError unless every reward is the weighted sum of the sample's own scores, or None where
    one failed.

    Args:
        scores: weight and scores by sample id, for each role that scores."""
    for sample, reward in rewards.items():
        parts = [(weight, of_role.get(sample)) for weight, of_role in scores]
        wanted = (
            None
            if any(score is None for _, score in parts)
            else sum(weight * score for weight, score in parts)
        )
        if reward != wanted:
            raise InvariantError(
                f"the reward of sample {sample} is {reward}, but its scores make {wanted}: it has "
                "another sample's"
            )


def check_reward_digests(
    sample_ids: Sequence[int],
    group_ids: Sequence[int],
    rewards: Sequence[float | None],
    digests: Mapping[int, int],
    tokens: Mapping[int, int],
    episode_of: Mapping[int, int],
) -> None:
    """Raise InvariantError if the driver computed a reward for other tokens than this training rank holds for
    the sample.

    Args:
        sample_ids, group_ids, rewards: of the episodes.
        digests: sample id -> `digest_of_reward`, made by the driver.
        tokens: sample id -> digest of its tokens, for the samples on this rank.
        episode_of: sample id -> episode, for the same samples."""
    of_episodes = dict(zip(sample_ids, zip(group_ids, rewards, strict=True), strict=True))
    for sample, of_tokens in tokens.items():
        group, reward = of_episodes[episode_of[sample]]
        if digest_of_reward(sample, group, reward, of_tokens) != digests.get(sample):
            raise InvariantError(
                f"the reward of sample {sample} ({reward}, group {group}) is not what the driver has for "
                "this sample's tokens: it belongs to another sample"
            )
