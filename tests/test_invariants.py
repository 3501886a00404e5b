"""Data that was changed on its way is caught: each mutation below is planted in a correct step, and one check
must name it.

pytest tests/test_invariants.py"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from megarl.algorithms.grpo import GRPO
from megarl.algorithms.ppo import PPO
from megarl.batch import Batch
from megarl.trainer.actor_state import ActorState
from megarl.trainer.rollout_batch import RolloutBatch
from megarl.batch_invariants import check_batch, check_column
from megarl.invariants import (
    InvariantError,
    check_plan,
    check_reward_digests,
    check_reward_sizes,
    check_rewards,
    check_samples,
    check_scores,
    check_versions,
    digest,
    digest_of_reward,
)
from megarl.packing import MiniBatch, Sample, branch_id, plan_mini_batches

VOCAB, PROMPTS, GROUP, MAX_LENGTH, MAX_TOKENS = 50, 3, 4, 20, 40


@dataclass
class Step:
    """What passes through one step, as the engine made it."""

    prompts: list[list[int]]
    responses: list[list[int]]
    samples: list[Sample]
    mini_batches: list[MiniBatch]
    batch: Batch
    records: list[dict]


def make_step() -> Step:
    rng = random.Random(0)
    count = PROMPTS * GROUP
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 6))] for _ in range(count)]
    responses = [[rng.randrange(VOCAB) for _ in range(rng.randint(3, 9))] for _ in range(count)]
    samples = [
        Sample(i, len(p) + len(r), len(r), (0,), digest=digest(p, r), group=i // GROUP)
        for i, (p, r) in enumerate(zip(prompts, responses))
    ]
    log_probs = [[-rng.random() for _ in r] for r in responses]
    batch = Batch.from_samples(list(range(count)), prompts, responses, log_probs)
    batch.advantages = batch.scatter([rng.gauss(0, 1) for _ in range(int(batch.response_mask.sum()))])
    records = [{"sample_id": s.sample_id, "reward": rng.random(), "digest": s.digest} for s in samples]
    records[5]["reward"] = None  # one that failed
    return Step(
        prompts,
        responses,
        samples,
        plan_mini_batches(samples, 8, {}, 2, MAX_TOKENS, 64, "seed"),
        batch,
        records,
    )


def check(step: Step) -> None:
    check_samples(step.samples, dict.fromkeys(range(PROMPTS), GROUP), MAX_LENGTH)
    check_plan(step.mini_batches, step.samples, MAX_TOKENS)
    check_batch(step.batch, {s.sample_id: s.digest for s in step.samples}, VOCAB)
    check_column(step.batch, "advantages")
    check_scores("reward", step.records, step.samples)


MUTATIONS = {}


def mutation(words: str):
    def add(change):
        MUTATIONS[change.__name__] = (change, words)
        return change

    return add


def rows(batch: Batch, index: int) -> slice:
    return slice(int(batch.cu_seqlens[index]), int(batch.cu_seqlens[index + 1]))


@mutation("it must cover a response, and not the first token")
def mask_shifted_by_one(step):
    step.batch.response_mask = step.batch.response_mask.roll(1)
    step.batch.rollout_log_probs = step.batch.rollout_log_probs.roll(1)


@mutation("its tokens or its mask are not those")
def mask_shifted_back_by_one(step):
    step.batch.response_mask = step.batch.response_mask.roll(-1)


@mutation("its tokens or its mask are not those")
def mask_without_the_last_token(step):
    for i in range(len(step.samples)):
        step.batch.response_mask[rows(step.batch, i).stop - 1] = False


@mutation("its mask covers 0 of")
def mask_empty(step):
    step.batch.response_mask[rows(step.batch, 4)] = False


@mutation("it must cover a response, and not the first token")
def mask_over_the_prompt(step):
    step.batch.response_mask[rows(step.batch, 4)] = True


@mutation("sample 1: its tokens or its mask are not those|sample 0: its tokens or its mask are not those")
def answers_swapped(step):
    a, b = step.responses[0], step.responses[1]
    step.batch = Batch.from_samples(list(range(12)), step.prompts, [b, a, *step.responses[2:]])


@mutation("its tokens or its mask are not those")
def ids_swapped(step):
    step.batch.sample_ids = step.batch.sample_ids[[1, 0, *range(2, 12)]]


@mutation("sample 3: its tokens or its mask are not those")
def one_token_changed(step):
    at = rows(step.batch, 3).stop - 1
    step.batch.tokens[at] = (step.batch.tokens[at] + 1) % VOCAB


@mutation("sample 3: its tokens or its mask are not those")
def one_token_of_a_prompt_changed(step):
    at = rows(step.batch, 3).start
    step.batch.tokens[at] = (step.batch.tokens[at] + 1) % VOCAB


@mutation("token ids .* are not all in the vocabulary of 50")
def token_outside_the_vocabulary(step):
    step.batch.tokens[7] = VOCAB


@mutation("sample 6: its tokens or its mask are not those")
def response_truncated_on_the_way(step):
    step.batch = Batch.from_samples(
        list(range(12)), step.prompts, [r[:-1] if i == 6 else r for i, r in enumerate(step.responses)]
    )


@mutation("sample 11 is here and should not be, or should be and is not")
def sample_lost_on_the_way(step):
    step.batch = step.batch.select(list(range(11)))


@mutation("do not cover the")
def boundaries_of_another_batch(step):
    step.batch.cu_seqlens = step.batch.cu_seqlens[:-1]


@mutation("sample 2 has 0 response tokens")
def response_empty(step):
    step.samples[2] = replace(step.samples[2], length=4, response_length=0)


@mutation("group 1 has 3 of 4 samples, and 1 of 3 groups have another number .* groups must be complete")
def group_truncated(step):
    del step.samples[7]


@mutation("sample 12 belongs to group 3, which is none of the 3 groups")
def sample_of_no_prompt(step):
    step.samples.append(replace(step.samples[0], sample_id=12, group=3))


@mutation("group 0 has 5 of 4 samples")
def sample_too_many(step):
    step.samples.append(replace(step.samples[0], sample_id=12))


@mutation("group 0 has 3 of 4 samples, and 2 of 3 groups have another number")
def sample_in_another_group(step):
    step.samples[2] = replace(step.samples[2], group=1)


@mutation("sample 3 was sampled more than once")
def sample_twice(step):
    step.samples.append(step.samples[3])


@mutation("sample 8 has .* at most 20 together")
def response_too_long(step):
    step.samples[8] = replace(step.samples[8], length=21)


@mutation(
    "a micro-batch of mini-batch 0 has [2-9] samples with .* tokens, and --max-tokens-per-micro-batch is 40"
)
def micro_batch_too_full(step):
    first = step.mini_batches[0]
    whole = tuple(
        (tuple(sample for micro in of_rank for sample in micro),) for of_rank in first.micro_batches
    )
    step.mini_batches[0] = replace(first, micro_batches=whole)


@mutation("is planned 0 times in an epoch")
def mini_batch_dropped(step):
    step.mini_batches = step.mini_batches[1:]


@mutation("is planned 2 times in an epoch")
def sample_planned_twice(step):
    first = step.mini_batches[0]
    step.mini_batches[0] = replace(
        first, micro_batches=(first.micro_batches[0] + first.micro_batches[0][:1], *first.micro_batches[1:])
    )


@mutation("its loss would be divided as for")
def loss_divided_by_one_ranks_tokens(step):
    step.mini_batches[0] = replace(step.mini_batches[0], num_tokens=step.mini_batches[0].num_tokens // 2)


@mutation("rollout_log_probs of sample .* there it must be finite and at most 0.001")
def log_prob_of_nothing(step):
    step.batch.rollout_log_probs[rows(step.batch, 2).stop - 1] = float("-inf")


@mutation("rollout_log_probs of sample .* there it must be finite and at most 0.001")
def log_prob_with_the_wrong_sign(step):
    step.batch.rollout_log_probs = -step.batch.rollout_log_probs


@mutation("rollout_log_probs of sample .* a prompt token; there it must be 0")
def log_probs_shifted_by_one(step):
    step.batch.rollout_log_probs = step.batch.rollout_log_probs.roll(-1)


@mutation("advantages of sample .* is nan .* a response token; there it must be finite")
def advantage_nan(step):
    step.batch.advantages[rows(step.batch, 9).stop - 1] = float("nan")


@mutation("advantages of sample .* is inf")
def advantage_infinite(step):
    step.batch.advantages[rows(step.batch, 9).stop - 1] = float("inf")


@mutation("reward says nan of sample 4")
def reward_nan(step):
    step.records[4]["reward"] = float("nan")


@mutation("reward has judged another response than sample 1")
def rewards_swapped(step):
    step.records[0]["sample_id"], step.records[1]["sample_id"] = 1, 0


@mutation("reward has scored sample 10 0 times")
def score_lost(step):
    del step.records[10]


@mutation("reward has scored sample 10 2 times")
def scored_twice(step):
    step.records.append(step.records[10])


def test_a_correct_step_passes():
    check(make_step())


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_change_on_the_way_is_caught(name):
    step, (change, words) = make_step(), MUTATIONS[name]
    change(step)
    with pytest.raises(InvariantError, match=words):
        check(step)


STALE = Sample(5, 9, 6, (0,), version=3, version_runs=((3, 4), (5, 2)))
"""Trained by step 6, with --staleness 2."""


def test_versions_within_the_bound_pass():
    whole = Sample(6, 9, 6, (0,), version=3)
    check_versions([STALE, whole, replace(whole, version=5)], step=6, staleness=2)
    check_versions([Sample(0, 2, 1, (0,), version=0)], step=1, staleness=1)


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"version": 2, "version_runs": ((2, 1), (3, 3), (5, 2))},
            "sample 5 has a token that version 2 of the weights sampled, and step 6 trains version 5: it is 3 "
            "versions old, and --staleness is 2",
        ),
        (
            {"version_runs": ((3, 3), (5, 1), (4, 2))},
            "sample 5: version 5 of the weights sampled a token before version 4 did: versions must not decrease "
            "within a response",
        ),
        (
            {"version_runs": ((3, 4), (6, 2))},
            "sample 5 was sampled by versions 3 to 6 of the weights, and step 6 trains version 5: they must be "
            "from 0 to 5",
        ),
        ({"version": -1, "version_runs": ()}, "sample 5 was sampled by versions -1 to -1 of the weights"),
        (
            {"version_runs": ((3, 4), (5, 1))},
            "sample 5 has 6 response tokens, and 5 versions of weights that sampled them",
        ),
    ],
)
def test_a_wrong_version_is_caught(change, words):
    with pytest.raises(InvariantError, match=re.escape(words)):
        check_versions([replace(STALE, sample_id=4), replace(STALE, **change)], step=6, staleness=2)


def test_samples_without_a_digest_and_empty_ranks_pass():
    step = make_step()
    check_batch(step.batch, dict.fromkeys(range(12)), VOCAB)
    empty = step.batch.select([])
    check_batch(empty, {}, VOCAB)
    check_column(empty, "advantages")


def test_returns_may_be_nan_where_a_reward_failed():
    batch = make_step().batch
    batch.returns = batch.scatter(torch.full((int(batch.response_mask.sum()),), float("nan")))
    check_column(batch, "returns", may_be_nan=True)
    batch.returns[0] = 1.0  # a prompt token
    with pytest.raises(InvariantError, match="returns of sample 0 is 1.0 at position 0, a prompt token"):
        check_column(batch, "returns", may_be_nan=True)


def test_the_digest_knows_where_the_response_begins():
    assert digest([5, 6], [7]) == digest((5, 6), (7,)) != digest([5], [6, 7]) != digest([], [5, 6, 7])


def test_a_reward_is_made_of_its_own_samples_scores():
    rule, model = {7: 1.0, 3: 0.5, 9: None}, {3: 2.0, 7: -1.0, 9: 4.0}
    scores = [(1.0, rule), (0.5, model)]
    check_rewards({7: 0.5, 3: 1.5, 9: None}, scores)
    for wrong in ({7: 1.5, 3: 0.5, 9: None}, {7: 0.5, 3: 1.5, 9: 2.0}, {7: None, 3: 1.5, 9: None}):
        with pytest.raises(InvariantError, match="the reward of sample [739] is .*, but its scores make"):
            check_rewards(wrong, scores)


def test_an_episode_comes_whole_and_is_trained_on_or_not_as_one():
    """Episode 0 of three with two samples each is only scored."""
    samples = [
        Sample(branch_id(e, b), 8, 4, (0,), group=0, branch=b, num_branches=2, trained=e > 0)
        for e in range(3)
        for b in range(2)
    ]
    check_samples(samples, {0: 3}, MAX_LENGTH)
    plan = plan_mini_batches(samples, 2, {}, 1, MAX_TOKENS, 64, None)
    check_plan(plan, samples, MAX_TOKENS)
    assert [(m.num_sequences, m.num_tokens) for m in plan] == [(1, 8), (1, 8)]
    for wrong in (samples[:-1], [replace(samples[0], trained=True), *samples[1:]]):
        with pytest.raises(InvariantError, match=r"episode \d+ has [12] samples here, .* must come whole"):
            check_samples(wrong, {0: 3}, MAX_LENGTH)
    parts = [samples[0], samples[2], samples[1], *samples[3:]]
    split = [
        one for part in (parts[:2], parts[2:]) for one in plan_mini_batches(part, 9, {}, 1, 40, 64, None)
    ]
    with pytest.raises(InvariantError, match=r"episode \d+ has samples in mini-batches 0 and 1"):
        check_plan(split, samples, MAX_TOKENS)


def test_a_reward_is_bound_to_sample_group_and_tokens():
    ids, groups, rewards, tokens = [7, 3, 9], [0, 0, 1], [1.0, None, 0.25], {7: 11, 9: 13}
    rows = zip(ids, groups, rewards, (11, 12, 13), strict=True)
    digests, alone = {row[0]: digest_of_reward(*row) for row in rows}, {sample: sample for sample in ids}
    check_reward_digests(ids, groups, rewards, digests, tokens, alone)
    for changed in (
        (ids, groups, [0.25, None, 1.0], digests, tokens),
        (ids, [0, 1, 0], rewards, digests, tokens),
        (ids, groups, rewards, digests, {7: 13, 9: 11}),
        ([9, 3, 7], groups, rewards, digests, tokens),
    ):
        with pytest.raises(InvariantError, match="the reward of sample [79] .* belongs to another sample"):
            check_reward_digests(*changed, alone)
    check_reward_digests(ids, groups, rewards, digests, {3: 12}, alone)  # another rank's are not looked at
    further = branch_id(3, 1)  # a second sample of episode 3
    digests[further] = digest_of_reward(further, 0, None, 15)
    check_reward_digests(ids, groups, rewards, digests, {further: 15}, {further: 3})
    for wrong in ({further: 12}, {branch_id(3, 2): 15}):
        with pytest.raises(
            InvariantError, match=r"the reward of sample \d+ \(None, group 0\) .* another sample"
        ):
            check_reward_digests(ids, groups, rewards, digests, wrong, dict.fromkeys(wrong, 3))


def samples_of(rewards):
    """Two samples of each prompt."""
    return [Sample(sample, 5, 2, group=sample // 2) for sample in rewards]


@pytest.mark.parametrize("algorithm", [GRPO(), PPO()])
def test_steps_whose_rewards_do_not_differ_within_a_prompt_are_told(algorithm):
    """Only where samples are compared within their prompt. Zero rewards count, and failed ones do not."""
    state = object.__new__(ActorState)
    state.config = SimpleNamespace(run=SimpleNamespace(warn_after_zero_reward_steps=2))
    state.actor, state.algorithm = "actor", algorithm
    state.zero_reward_steps = state.equal_reward_steps = 0
    constant, zero, between = {0: 0.5, 1: 0.5}, {0: 0.0, 1: 0.0}, {0: 1.0, 1: 1.0, 2: 0.0, 3: None}
    steps = (constant, between, zero, constant, {0: 1.0, 1: 1.0, 2: 0.0, 3: 1.0}, constant, {}, constant)
    notes = [
        state.note_useless_rewards(RolloutBatch(number, {0: 0}, samples_of(rewards), rewards=rewards))
        for number, rewards in enumerate(steps, 1)
    ]
    told = [number for number, note in enumerate(notes, 1) if note]
    assert told == ([2, 4, 8] if algorithm.relative_to_group else [])
    for number, count in ((2, 2), (4, 4), (8, 2)) if told else ():
        assert notes[number - 1].startswith(
            f"step {number}: in {count} steps of actor all samples of a prompt had the same reward,"
        )


def test_steps_without_a_reward_are_told():
    state = object.__new__(ActorState)
    state.config = SimpleNamespace(run=SimpleNamespace(warn_after_zero_reward_steps=2))
    state.actor, state.algorithm = "actor", GRPO()
    state.zero_reward_steps = state.equal_reward_steps = 0
    steps = ({0: 0.0}, {0: 0.0}, {0: 0.0, 1: 0.5}, {0: 0.0}, {}, {0: None, 1: 0.0}, {0: 0.0})
    notes = [
        state.note_useless_rewards(RolloutBatch(number, {0: 0}, samples_of(rewards), rewards=rewards))
        for number, rewards in enumerate(steps, 1)
    ]
    assert [note and note.split(" of actor. ")[0] for note in notes] == [
        None,
        "step 2: no reward but 0 in 2 steps",
        None,
        None,
        None,
        "step 6: no reward but 0 in 2 steps",
        None,
    ]


@pytest.mark.parametrize("reward", [1e39, -1e39, float("inf"), float("nan")])
def test_a_reward_that_float32_cannot_hold_is_named(reward):
    check_reward_sizes({3: 3.4e38, 4: None, 5: -3.4e38})
    shown = re.escape(str(reward))
    with pytest.raises(
        ValueError,
        match=rf"reward of sample 4 \({shown}\): must be a number that float32 holds .* batch.rewards",
    ):
        check_reward_sizes({3: 1.0, 4: reward})
    with pytest.raises(
        InvariantError, match=rf"judge says {shown} of sample 0: a score must be finite in float32"
    ):
        check_scores("judge", [{"sample_id": 0, "score": reward}], [Sample(0, 5, 2)])
