"""GRPO's advantages with --turn-rewards against their formula in float64.

pytest tests/algorithms/test_turn_rewards.py"""

from __future__ import annotations

import math
import random

import pytest
import torch

from megarl.algorithms import GRPO
from megarl.algorithms.base import AdvantageInputs
from megarl.algorithms.turn_rewards import TurnRewards, turn_rewards_of
from megarl.batch import Batch
from megarl.invariants import InvariantError
from megarl.workers.recompute import check_advantages

Turns = list[TurnRewards | None]


def step(seed: int, last_only: bool = False, max_turns: int = 4) -> tuple[list[int], Turns]:
    """The groups and answers of five groups of one to six episodes, some failed, in a random order."""
    rng = random.Random(seed)
    found = []
    for group, size in ((3, 6), (9, 4), (4, 5), (70, 1), (5, 2)):
        for _ in range(size):
            rewards = [
                rng.choice([0.0, 0.25, 1.0, rng.uniform(-2, 2)]) for _ in range(rng.randint(1, max_turns))
            ]
            if last_only:
                rewards[:-1] = [0.0] * (len(rewards) - 1)
            turns = TurnRewards(rewards, [rng.randint(1, 5) for _ in rewards])
            found.append((group, None if rng.random() < 0.15 else turns))
    rng.shuffle(found)
    return [group for group, _ in found], [turns for _, turns in found]


def inputs_of(groups: list[int], turns: Turns | None, episodes: Turns, rows=None) -> AdvantageInputs:
    """What one rank that holds the samples `rows` gets. Failed episodes have 4 tokens."""
    lengths = [4 if one is None else sum(one.lengths) for one in episodes]
    rows = range(len(groups)) if rows is None else rows
    return AdvantageInputs(
        rewards=torch.tensor([math.nan if one is None else sum(one.rewards) for one in episodes]),
        group_ids=torch.tensor(groups),
        rows=torch.tensor([*rows], dtype=torch.int64),
        response_lengths=torch.tensor([lengths[row] for row in rows], dtype=torch.int64),
        kl_coef=0.0,
        sum_over_ranks=lambda total: total,
        sample_lengths=torch.tensor(lengths),
        turns=turns,
    )


def formula(groups: list[int], episodes: Turns, row: int, with_std: bool) -> list[float]:
    """The advantages of the tokens of one sample by the definition, in plain float64."""
    mine = episodes[row]
    group = [one for number, one in zip(groups, episodes) if number == groups[row] and one is not None]
    if mine is None or len(group) == 1:
        return [0.0] * (4 if mine is None else sum(mine.lengths))

    def return_of(one: TurnRewards, k: int) -> float:
        return sum(one.rewards[k:])

    mean = sum(sum(return_of(g, k) for k in range(len(g.rewards))) / len(g.rewards) for g in group)
    mean /= len(group)
    variance = sum(
        sum((return_of(g, k) - mean) ** 2 for k in range(len(g.rewards))) / len(g.rewards) for g in group
    ) / (len(group) - 1)
    scale = math.sqrt(variance) + 1e-4 if with_std else 1.0
    return [
        (return_of(mine, k) - mean) / scale for k, length in enumerate(mine.lengths) for _ in range(length)
    ]


@pytest.mark.parametrize("with_std", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_advantages_are_those_of_the_formula(seed, with_std):
    groups, turns = step(seed)
    algorithm = GRPO(normalize_advantages_by_std=with_std)
    columns, metrics = algorithm.compute_advantages(inputs_of(groups, turns, turns))
    expected = [value for row in range(len(turns)) for value in formula(groups, turns, row, with_std)]
    torch.testing.assert_close(
        columns["advantages"].double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5
    )
    assert metrics["reward/failed"] == sum(one is None for one in turns)
    # a part of the samples, in another order, gives the same numbers
    rows = random.Random(seed).sample(range(len(turns)), 7)
    part, _ = algorithm.compute_advantages(inputs_of(groups, turns, turns, rows))
    whole = columns["advantages"].split(inputs_of(groups, turns, turns).response_lengths.tolist())
    assert any(len({*of_one.tolist()}) > 1 for of_one in whole), "the answers of an episode must differ"
    assert part["advantages"].tolist() == torch.cat([whole[row] for row in rows]).tolist()
    assert len(algorithm.compute_advantages(inputs_of(groups, turns, turns, []))[0]["advantages"]) == 0


@pytest.mark.parametrize("with_std", [True, False])
def test_single_answers_have_the_advantages_of_whole_episodes_bit_for_bit(with_std):
    algorithm = GRPO(normalize_advantages_by_std=with_std)
    groups, turns = step(1, max_turns=1)
    with_turns, without = (
        algorithm.compute_advantages(inputs_of(groups, one, turns))[0]["advantages"] for one in (turns, None)
    )
    assert with_turns.tolist() == without.tolist() and without.any()


def test_rewards_at_the_end_give_the_advantages_of_whole_episodes():
    groups, turns = step(2, last_only=True)
    with_turns, without = (
        GRPO().compute_advantages(inputs_of(groups, one, turns))[0]["advantages"] for one in (turns, None)
    )
    torch.testing.assert_close(with_turns, without, rtol=1e-6, atol=1e-6)


def test_equal_returns_give_exactly_nothing():
    turns = [
        TurnRewards([0.0, 0.0, 0.1], [1, 1, 1]),
        TurnRewards([0.1], [3]),
        TurnRewards([0.0, 0.1], [1, 2]),
    ]
    columns, _ = GRPO().compute_advantages(inputs_of([1, 1, 1], turns, turns))
    assert columns["advantages"].tolist() == [0.0] * 9


def test_a_reward_for_the_first_answer_does_not_speed_up_the_second():
    turns = [TurnRewards([1.0, 0.0], [1, 1]), TurnRewards([0.0, 0.0], [1, 1])]
    advantages = GRPO().compute_advantages(inputs_of([1, 1], turns, turns))[0]["advantages"].tolist()
    assert advantages[0] > 0 > advantages[1] == advantages[2] == advantages[3]


def test_the_slow_reference_accepts_the_advantages_and_finds_swapped_ones():
    groups, turns = step(3)
    ids = [10 + row for row in range(len(turns))]
    inputs = inputs_of(groups, turns, turns)
    batch = Batch.from_samples(ids, [[1, 2]] * len(ids), [[3] * n for n in inputs.response_lengths.tolist()])
    columns, _ = GRPO().compute_advantages(inputs)

    def check(values: torch.Tensor) -> None:
        batch.set_column("advantages", batch.scatter(values))
        check_advantages(
            GRPO(),
            batch,
            dict(zip(ids, inputs.rewards.tolist())),
            dict(zip(ids, groups)),
            0.0,
            dict(zip(ids, inputs.response_lengths.tolist())),
            "seed",
            inputs.sum_over_ranks,
            dict(zip(ids, turns)),
        )

    check(columns["advantages"])
    with pytest.raises(InvariantError, match="advantages of sample"):
        check(columns["advantages"].flip(0))


@pytest.mark.parametrize(
    "reward, length, rewards, lengths",
    [(1.0, 5, [1.0, 0.5], [2, 3]), (1.5, 4, [1.0, 0.5], [2, 3]), (1.5, 5, [1.0, 0.5], [5])],
)
def test_answers_that_do_not_add_up_are_refused(reward, length, rewards, lengths):
    assert turn_rewards_of([7], [None], [length], [[]], [[]]) == [None]
    assert turn_rewards_of([7], [1.5], [5], [[1.0, 0.5]], [[2, 3]]) == [TurnRewards([1.0, 0.5], [2, 3])]
    with pytest.raises(ValueError, match="--turn-rewards: sample 7 has the reward .* They must add up"):
        turn_rewards_of([7], [reward], [length], [rewards], [lengths])
