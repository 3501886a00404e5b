"""DAPO's penalty of long responses against the paper's formula, and what is counted.

pytest tests/workers/test_reward_shaping.py"""

from types import SimpleNamespace

import pytest

from megarl.algorithms import GRPO, PPO, REGISTRY, SFT
from megarl.config.loader import load_config
from megarl.packing import Sample
from megarl.workers.reward_shaping import shaped, shaping_metrics

LENGTHS = [1, 60, 70, 85, 99, 100]


def of(trained: list[bool]) -> list[SimpleNamespace]:
    """Samples of which these are trained on."""
    return [SimpleNamespace(trained=one) for one in trained]


def job(flags):
    required = "--algorithm grpo --model m --train-data d --save s --train-iters 1".split()
    return load_config([*required, *flags.split()], REGISTRY)


def dapo(length, longest, buffer):
    """2503.14476, eq. 13."""
    if length <= longest - buffer:
        return 0.0
    return ((longest - buffer) - length) / buffer if length <= longest else -1.0


@pytest.mark.parametrize("cls", [GRPO, PPO])
@pytest.mark.parametrize("penalty", [1.0, 0.25])
def test_the_penalty_is_that_of_the_paper(cls, penalty):
    algorithm = cls(overlong_buffer=40, overlong_penalty=penalty)
    samples = [Sample(i, 200, length) for i, length in enumerate(LENGTHS)]
    rewards = [1.0, 0.5, None, -1.0, 0.0, 1.0]
    found = shaped(algorithm, [s.response_length for s in samples], rewards, job("--max-response-length 100"))
    wanted = [None if r is None else r + penalty * dapo(n, 100, 40) for r, n in zip(rewards, LENGTHS)]
    assert found == pytest.approx(wanted) and found[0] == 1.0 and found[5] == 1.0 - penalty
    parts = [
        shaping_metrics(rewards, found, [False] * 6, of([True] * 6), rows)
        for rows in ([5, 1, 2], [0, 4, 3], [])
    ]
    total = sum(part["reward/overlong_penalty"] for part in parts)
    assert total == pytest.approx(sum(r - f for r, f in zip(rewards, found) if r is not None) / 5)
    assert all(set(part) == {"reward/overlong_penalty"} for part in parts)


def test_the_limit_of_an_episode_is_that_of_all_its_answers():
    config = job("--max-response-length 48 --max-turns 3 --env env.py:Env")
    lengths, algorithm = [48, 60, 128, 136, 144], GRPO(overlong_buffer=16)
    assert shaped(algorithm, lengths, [1.0] * 5, config) == [1.0, 1.0, 1.0, 0.5, 0.0]


def test_without_the_flag_rewards_are_the_same_numbers():
    for algorithm in (GRPO(), SFT()):
        assert algorithm.shaped_reward(0.1, 100, 100) == 0.1 and not algorithm.is_left_out(truncated=True)
    assert shaping_metrics([0.1, None], [0.1, None], [False, True], of([True, True]), [0, 1]) == {}


def test_samples_that_the_filter_leaves_out_are_counted_without_failed_ones():
    algorithm = GRPO(overlong_filter=True)
    assert algorithm.is_left_out(truncated=True) and not algorithm.is_left_out(truncated=False)
    rewards, left_out = [1.0, None, 0.0, 1.0], [True, True, False, True]
    parts = [shaping_metrics(rewards, rewards, left_out, of([True] * 4), rows) for rows in ([0, 1], [2, 3])]
    assert [part["reward/overlong_filtered"] for part in parts] == [1, 1]


def test_samples_that_are_not_trained_on_do_not_count():
    """The mean is over the samples that this and the other ranks train on, without greedy answers."""
    algorithm, config = GRPO(overlong_buffer=40), job("--max-response-length 100")
    rewards, trained = [1.0, 0.5, 1.0, None], [True, True, False, True]
    found = shaped(algorithm, [100, 80, 100, 100], rewards, config)
    assert found == [0.0, 0.0, 0.0, None]
    left_out = [True, False, True, True]
    metrics = [shaping_metrics(rewards, found, left_out, of(trained), rows) for rows in ([0], [1, 3])]
    assert [one["reward/overlong_penalty"] for one in metrics] == [0.5, 0.25]
    assert [one["reward/overlong_filtered"] for one in metrics] == [1, 0]
    only_greedy = shaping_metrics([1.0, 1.0], [1.0, 0.5], [False, True], of([True, False]), [0])
    assert only_greedy == {}
