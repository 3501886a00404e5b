"""Episodes of several samples in the driver: groups, mini-batches, rewards and counts are of episodes.

pytest tests/trainer/test_branches.py"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megarl.invariants import InvariantError, check_plan, check_samples, digest_of_reward
from megarl.packing import MAX_BRANCHES, Sample, branch_id, by_episode, plan_mini_batches
from megarl.trainer.buffer import SampleBuffer, SampleBufferError
from megarl.trainer.rollout_batch import RolloutBatch
from megarl.trainer.scores import check_failed_rewards, take_scores

NUM_GROUPS, SIZE = 4, 3


def samples_of(seed: int = 0, branches: tuple[int, ...] = (1, 1, 2, 4)) -> list[Sample]:
    """The samples of a step, sorted by their ids, as the driver has them."""
    rng, found = random.Random(seed), []
    for episode in range(NUM_GROUPS * SIZE):
        count = rng.choice(branches)
        for branch in range(count):
            length = rng.randint(2, 20)
            sampled = rng.randint(1, length - 1)
            found.append(
                Sample(
                    branch_id(episode, branch),
                    length,
                    sampled,
                    (0,),
                    digest=rng.randrange(1 << 32),
                    group=episode // SIZE,
                    branch=branch,
                    num_branches=count,
                )
            )
    return sorted(found, key=lambda sample: sample.sample_id)


def test_ids_tell_the_episode_and_are_numbers_that_json_holds():
    last = Sample(branch_id((1 << 40) - 1, MAX_BRANCHES - 1), 2, 1, branch=MAX_BRANCHES - 1)
    assert last.episode == (1 << 40) - 1 and last.sample_id < 1 << 53
    assert Sample(7, 2, 1).episode == 7 and Sample(-3, 2, 1).episode == -3  # a canary
    assert len({branch_id(episode, branch) for episode in range(50) for branch in range(50)}) == 2500


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_an_episode_is_in_one_mini_batch_and_counts_once(dp_size):
    for seed in range(20):
        samples = samples_of(seed)
        plan = plan_mini_batches(samples, 5, {}, dp_size, 30, 64, seed="1/1")
        check_plan(plan, samples, 30)
        assert [m.num_sequences for m in plan] == [5, 5, 2]
        assert sum(m.num_tokens for m in plan) == sum(sample.response_length for sample in samples)
        members = [{s for rank in range(dp_size) for s in m.samples_of(rank)} for m in plan]
        for of_one in by_episode(samples).values():
            assert sum(not mine.isdisjoint(s.sample_id for s in of_one) for mine in members) == 1


def test_episodes_of_one_sample_are_planned_as_samples_were():
    """The same shuffle of a list of the same length: the order of a plan of plain samples has not changed."""
    samples = samples_of(branches=(1,))
    order = [sample.sample_id for sample in samples]
    random.Random("1/1").shuffle(order)
    plan = plan_mini_batches(samples, 5, {}, 1, 1, 64, seed="1/1")
    assert [{*m.samples_of(0)} for m in plan] == [{*order[:5]}, {*order[5:10]}, {*order[10:]}]


def test_incomplete_and_split_episodes_are_found():
    samples, sizes = samples_of(), dict.fromkeys(range(NUM_GROUPS), SIZE)
    check_samples(samples, sizes, 20)
    several = next(sample for sample in samples if sample.branch == 1)
    others = [sample for sample in samples if sample is not several]
    for wrong, what in (
        (others, "an episode must come whole"),
        ([*others, replace(several, group=several.group + 1)], "an episode must come whole"),
        ([*others, replace(several, truncated=True)], "an episode must come whole"),
        ([s for s in samples if s.episode != several.episode], f"has {SIZE - 1} of {SIZE} samples"),
    ):
        with pytest.raises(InvariantError, match=what):
            check_samples(wrong, sizes, 20)
    alone = [replace(sample, branch=0) for sample in samples]  # each taken for an episode of its own
    episode_of = {sample.sample_id: sample.episode for sample in samples}
    plan = [
        replace(m, num_sequences=len({episode_of[s] for s in m.samples_of(0)}))
        for m in plan_mini_batches(alone, 5, {}, 1, 30, 64, "1")
    ]
    with pytest.raises(InvariantError, match="has samples in mini-batches"):
        check_plan(plan, samples, 30)
    (whole,) = plan_mini_batches(samples, 100, {}, 1, 30, 64, "1")
    with pytest.raises(InvariantError, match=f"mini-batch 0 has {NUM_GROUPS * SIZE} samples"):
        check_plan([replace(whole, num_sequences=len(samples))], samples, 30)


def test_a_group_is_finished_with_all_samples_of_all_episodes():
    samples = samples_of()
    for seed in range(10):
        buffer = SampleBuffer(NUM_GROUPS)
        buffer.admit({group: 0 for group in range(NUM_GROUPS)}, SIZE, 0)
        buffer.issue()
        order = samples.copy()
        random.Random(seed).shuffle(order)
        for sample in order:
            assert not buffer.is_ready(1)
            buffer.add([sample])
        assert buffer.is_ready(1)
        with pytest.raises(SampleBufferError, match=f"is one more than the {SIZE} of visit 0"):
            buffer.add([replace(samples[0], sample_id=99)])
        batch = RolloutBatch(1, {})
        batch.take(buffer.take(1))
        assert batch.samples == samples


def test_rewards_and_lengths_are_those_of_episodes():
    samples = samples_of()
    batch = RolloutBatch(1, dict.fromkeys(range(NUM_GROUPS), 5), samples=samples)
    episodes = [*range(NUM_GROUPS * SIZE)]
    assert batch.sample_ids == episodes and batch.group_ids == [e // SIZE for e in episodes]
    assert batch.row_of == dict.fromkeys(episodes, 5) and len(samples) > len(episodes)
    for name, lengths in (("response_length", batch.response_lengths), ("length", batch.lengths)):
        assert lengths == {
            e: sum(getattr(sample, name) for sample in samples if sample.episode == e) for e in episodes
        }
    digest_of = {sample.sample_id: sample.digest for sample in samples}
    records = [{"sample_id": e, "reward": e / 4, "digest": digest_of[e]} for e in episodes]
    take_scores(batch, "reward", [records], {"reward": 1.0})
    assert batch.rewards == {e: e / 4 for e in episodes}
    assert batch.reward_digests == {
        s.sample_id: digest_of_reward(s.sample_id, s.group, s.episode / 4, s.digest) for s in samples
    }
    assert batch.groups_that_differ == {*range(NUM_GROUPS)}
    check_failed_rewards(batch, ["reward"], 0.0)
    of_branch = next(sample for sample in samples if sample.branch)
    wrong = [*records, {"sample_id": of_branch.sample_id, "reward": 1.0, "digest": of_branch.digest}]
    with pytest.raises(InvariantError, match="each sample of the step must be, once"):
        take_scores(batch, "reward", [wrong], {"reward": 1.0})
