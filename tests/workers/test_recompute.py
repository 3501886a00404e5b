"""Advantages that the algorithm computed are accepted whatever the options, and those of a fault in the
computation are not.

    pytest tests/workers/test_recompute.py

Ranks are threads that meet in their sums. Rewards up to 1e4 with differences of 1e-2 are there for the
rounding of fp32: 1e4 has a unit in the last place of 1e-3."""

from __future__ import annotations

import itertools
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

from megarl.algorithms import GRPO, PPO, REGISTRY
from megarl.algorithms.base import AdvantageInputs, Algorithm
from megarl.batch import Batch
from megarl.invariants import InvariantError
from megarl.workers import recompute
from megarl.workers.advantage_inputs import ADVANTAGE_COLUMNS

KL_COEF = 0.3
GROUPS, GROUP_SIZE = 6, 4


@dataclass
class Rank:
    batch: Batch
    inputs: AdvantageInputs
    rewards: dict[int, float]
    group_of: dict[int, int]


class Sums:
    """The sum over ranks of what each of them brings, as an all-reduce."""

    def __init__(self, num_ranks: int):
        self.barrier, self.parts = threading.Barrier(num_ranks, timeout=20), {}

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        self.parts[threading.get_ident()] = values.clone()
        self.barrier.wait()
        total = torch.stack(list(self.parts.values())).sum(0)
        self.barrier.wait()
        return total


def make_ranks(
    algorithm: Algorithm, seed: int, num_ranks: int = 2, level: float = 0.0, spread: float = 1.0
) -> list[Rank]:
    """A step whose samples are spread over the ranks in any order, with sample ids that are no positions. One
    reward failed."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ids = rng.sample(range(1000), GROUPS * GROUP_SIZE)
    rewards = {
        s: float(torch.tensor(level + spread * rng.choice([0.0, 0.25, 1.0, rng.random()]))) for s in ids
    }
    rewards[ids[5]] = math.nan
    group_of = {s: i // GROUP_SIZE for i, s in enumerate(ids)}
    shuffled = rng.sample(ids, len(ids))
    sums, ranks = Sums(num_ranks), []
    lengths_of_all = {s: rng.choice([1, 2, rng.randint(1, 30)]) for s in shuffled}
    for number in range(num_ranks):
        mine = shuffled[number::num_ranks]
        lengths = [lengths_of_all[s] for s in mine]
        batch = Batch.from_samples(mine, [[1, 2]] * len(mine), [[3] * n for n in lengths])
        for name in ADVANTAGE_COLUMNS:
            noise = torch.randn(sum(lengths), generator=generator)
            batch.set_column(name, batch.scatter(noise if name == "values" else -2 * noise.abs()))
        inputs = AdvantageInputs(
            rewards=torch.tensor(list(rewards.values())),
            group_ids=torch.tensor(list(group_of.values())),
            rows=torch.tensor([list(rewards).index(s) for s in mine]),
            response_lengths=torch.tensor(lengths),
            kl_coef=KL_COEF,
            sum_over_ranks=sums,
            sample_lengths=torch.tensor([lengths_of_all[s] for s in rewards]),
            **{name: getattr(batch, name)[batch.response_mask] for name in ADVANTAGE_COLUMNS},
        )
        ranks.append(Rank(batch, inputs, rewards, group_of))
    return ranks


def step(
    algorithm: Algorithm, ranks: list[Rank], before=lambda rank: None, after=lambda rank: None
) -> list[str]:
    """What the ranks object to. before, after: a fault in what the computation gets, or in the columns that
    it has written."""

    def run(number: int) -> str:
        rank = ranks[number]
        before(rank)
        columns, _ = algorithm.compute_advantages(rank.inputs)
        for name, values in columns.items():
            rank.batch.set_column(name, rank.batch.scatter(values))
        after(rank)
        try:
            recompute.check_advantages(
                algorithm,
                rank.batch,
                rank.rewards,
                rank.group_of,
                KL_COEF,
                dict(zip(rank.rewards, rank.inputs.sample_lengths.tolist())),
                f"seed {number} {rank.batch.sample_ids.tolist()}",
                rank.inputs.sum_over_ranks,
            )
        except InvariantError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [words for words in pool.map(run, range(len(ranks))) if words]


KLS = [{}] + [
    {"kl_mode": "reward", "kl_coef": 0.1, "kl_estimator": kind} for kind in ("k1", "abs", "k2", "k3")
]
NEW = ("rloo", "reinforce++", "reinforce++-baseline", "opo", "maxrl")
ALGORITHMS = [
    *(GRPO(normalize_advantages_by_std=std, **kl) for std in (True, False) for kl in KLS),
    *(
        PPO(whiten_advantages=whiten, gamma=gamma, gae_lambda=gae_lambda, **kl)
        for whiten in (True, False)
        for gamma, gae_lambda in ((1.0, 0.95), (0.9, 1.0), (1.0, 1.0))
        for kl in KLS
    ),
    *(REGISTRY[name](**kl) for name in NEW for kl in KLS),
]
LEVELS = ((0.0, 1.0), (1e4, 1e-2), (-300.0, 50.0), (0.1, 0.0))
"""Mean of the rewards, and how far they spread around it."""


def describe(algorithm: Algorithm) -> str:
    return f"{type(algorithm).__name__}-{algorithm.kl_mode}-{algorithm.kl_estimator}"


@pytest.mark.parametrize("index", range(len(ALGORITHMS)), ids=[describe(one) for one in ALGORITHMS])
def test_what_the_algorithm_computes_is_accepted(index, monkeypatch):
    """Every level with every number of ranks, over the algorithms."""
    monkeypatch.setattr(recompute, "NUM_TOKENS", 10**6)
    for seed in range(4):
        level, spread = LEVELS[(index + seed) % 4]
        assert step(ALGORITHMS[index], make_ranks(ALGORITHMS[index], seed, seed % 3 + 1, level, spread)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=describe)
def test_it_is_accepted_at_every_level(algorithm, monkeypatch):
    monkeypatch.setattr(recompute, "NUM_TOKENS", 10**6)
    for seed, (level, spread) in itertools.product(range(4), LEVELS):
        assert step(algorithm, make_ranks(algorithm, seed, seed % 3 + 1, level, spread)) == []


def reverse_rows(rank):
    rank.inputs = replace(rank.inputs, rows=rank.inputs.rows.flip(0))


def shift_rewards(rank):
    rank.inputs = replace(rank.inputs, rewards=rank.inputs.rewards.roll(1))


def forget_the_kl(rank):
    rank.inputs = replace(rank.inputs, ref_log_probs=rank.inputs.old_log_probs)


def double_the_kl(rank):
    rank.inputs = replace(rank.inputs, kl_coef=2 * rank.inputs.kl_coef)


def reverse_tokens(rank):
    rank.batch.set_column(
        "advantages", rank.batch.scatter(rank.batch.advantages[rank.batch.response_mask].flip(0))
    )


def swap_two_samples(rank):
    """Advantages of two samples of this rank, of one token each, in the first group that the rank looks
    at."""
    rank.batch.advantages[rank.batch.response_mask] = rank.batch.advantages[rank.batch.response_mask].roll(1)


def values_of_the_next_sample(rank):
    rank.inputs = replace(rank.inputs, values=rank.inputs.values.roll(1))


@pytest.mark.parametrize(
    "algorithm",
    [
        GRPO(),
        GRPO(normalize_advantages_by_std=False),
        PPO(),
        PPO(whiten_advantages=False),
        *(REGISTRY[name]() for name in NEW),
    ],
    ids=["grpo", "grpo-no-std", "ppo", "ppo-no-whitening", *NEW],
)
@pytest.mark.parametrize(
    "before, after",
    [(reverse_rows, None), (shift_rewards, None), (None, reverse_tokens), (None, swap_two_samples)],
)
def test_advantages_of_other_samples_are_found_in_the_same_step(algorithm, before, after):
    for seed in range(10):
        found = step(
            algorithm,
            make_ranks(algorithm, seed),
            before or (lambda rank: None),
            after or (lambda rank: None),
        )
        assert len(found) == 2 and all("its reference says" in words for words in found), (seed, found)


@pytest.mark.parametrize(
    "algorithm", [GRPO(kl_mode="reward", kl_coef=0.1), PPO(kl_mode="reward", kl_coef=0.1, kl_estimator="k1")]
)
@pytest.mark.parametrize("fault", [forget_the_kl, double_the_kl])
def test_another_kl_is_found(algorithm, fault):
    for seed in range(5):
        assert len(step(algorithm, make_ranks(algorithm, seed), fault)) == 2


def test_other_values_are_found():
    for algorithm in (PPO(), PPO(whiten_advantages=False)):
        for seed in range(5):
            assert len(step(algorithm, make_ranks(algorithm, seed), values_of_the_next_sample)) == 2


def test_whitening_by_the_ranks_own_tokens_is_found():
    for seed in range(5):
        ranks = make_ranks(PPO(), seed)

        def whiten_alone(rank):
            rank.inputs = replace(rank.inputs, sum_over_ranks=lambda mine: mine)

        def compare_together(rank, whole=ranks[0].inputs):
            rank.inputs = replace(rank.inputs, sum_over_ranks=whole.sum_over_ranks)

        found = step(PPO(), ranks, whiten_alone, compare_together)
        assert found and all(words.startswith("advantages of sample") for words in found)


def test_the_message_names_the_sample_what_was_found_and_what_was_expected():
    def spoil(rank):
        rank.batch.advantages[rank.batch.response_mask.nonzero()[0]] = 7.25

    ranks = make_ranks(GRPO(), seed=0, num_ranks=1)
    sample = int(ranks[0].batch.sample_ids[0])
    (words,) = step(GRPO(), ranks, after=spoil)
    assert words.startswith(
        f"advantages of sample {sample} (reward {ranks[0].rewards[sample]:g}) is 7.25 at response "
        "token 0, and its reference"
    )


def test_a_large_step_is_recomputed_in_part_and_by_the_seed():
    of = {2: 0, 3: 1, 4: 1, 6: 2}
    orders = [recompute._draw(of, str(seed)) for seed in range(50)]
    assert len({str(order) for order in orders}) == 6 and all(
        sorted(order) == [[2], [3, 4], [6]] for order in orders
    )
    assert orders == [recompute._draw(dict(reversed(of.items())), str(seed)) for seed in range(50)]


def test_at_least_one_whole_group_of_each_rank_is_recomputed(monkeypatch):
    """One advantage is wrong, and so it is found in those steps in which its group is drawn first: by chance
    in one of six."""
    monkeypatch.setattr(recompute, "NUM_TOKENS", 1)
    found = 0
    for seed in range(60):
        ranks = make_ranks(GRPO(), seed, num_ranks=1)
        wrong = ranks[0].batch.sample_ids[7]

        def spoil(rank, wrong=wrong):
            rank.batch.advantages[
                (rank.batch.sample_ids == wrong)[rank.batch.sample_of_token] & rank.batch.response_mask
            ] += 0.5

        found += len(step(GRPO(), ranks, after=spoil))
    assert 3 <= found <= 20  # 10 +- 2.9


def test_an_algorithm_without_a_reference_is_not_compared():
    class Own(GRPO):
        def reference_advantages(self, inputs, sample):
            return None

    assert step(Own(), make_ranks(Own(), 0), shift_rewards) == []


def with_rewards(algorithm: Algorithm, rewards: list[float]) -> list[Rank]:
    """A step of one rank whose groups of four have these rewards."""
    (rank,) = make_ranks(algorithm, 0, num_ranks=1)
    rank.rewards = dict(zip(rank.rewards, itertools.cycle(rewards)))
    rank.inputs = replace(rank.inputs, rewards=torch.tensor(list(rank.rewards.values())))
    return [rank]


@pytest.mark.parametrize(
    "name, flags, rewards, kept",
    [
        ("raft", {"raft_min_reward": 0.7}, [0.7, 0.2, 0.1, 0.0], 0),
        ("raft", {}, [0.3, 0.1 + 0.2, 0.0, 0.0], 0),
        ("raft", {}, [0.0, 0.3, 0.1 + 0.2, 0.0], 1),
        ("maxrl", {}, [-0.1, -0.2, 0.3, 0.0], None),
    ],
    ids=["at the limit", "a tie", "a tie behind another", "a mean of 0"],
)
def test_rewards_that_fp32_cannot_hold_are_the_same_for_the_reference(name, flags, rewards, kept):
    algorithm = REGISTRY[name](**flags)
    ranks = with_rewards(algorithm, rewards)
    assert step(algorithm, ranks) == []
    advantages = ranks[0].batch.advantages[ranks[0].batch.response_mask]
    place = {sample: number % GROUP_SIZE for number, sample in enumerate(ranks[0].rewards)}
    lengths = ranks[0].batch.response_lengths.tolist()
    for sample, values in zip(ranks[0].batch.sample_ids.tolist(), advantages.split(lengths), strict=True):
        assert values.tolist() == [float(place[sample] == kept)] * len(values)


class Clamped(GRPO):
    def sample_advantages(self, rewards, group_ids, lengths):
        return GRPO.sample_advantages(self, rewards, group_ids, lengths).clamp(-0.5, 0.5)


class Checked(Clamped):
    def reference_advantage(self, mine, group):
        advantage, scale = GRPO.reference_advantage(self, mine, group)
        return max(-0.5, min(0.5, advantage)), scale


def test_the_reference_of_a_base_class_is_not_that_of_other_advantages():
    assert step(Clamped(), make_ranks(Clamped(), 0)) == []
    assert step(Clamped(), make_ranks(Clamped(), 0), after=reverse_tokens) == []
    assert step(Checked(), make_ranks(Checked(), 0)) == []
    assert len(step(Checked(), make_ranks(Checked(), 0), after=reverse_tokens)) == 2
