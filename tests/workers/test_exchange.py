"""Samples between real gloo processes: they arrive bit for bit, in the order that was asked for. One run of three ranks (run_exchange.py).

    pytest tests/workers/test_exchange.py"""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest

from tests.workers.run_exchange import NUM_SAMPLES, SCENARIOS, WORLD_SIZE, sample


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("exchange")
    script = Path(__file__).with_name("run_exchange.py")
    processes = [subprocess.Popen([sys.executable, str(script), str(folder), str(rank)], stderr=subprocess.PIPE, text=True)
                 for rank in range(WORLD_SIZE)]  # fmt: skip
    errors = [process.communicate(timeout=90)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * WORLD_SIZE, "\n".join(errors)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def expected(sample_ids: list[int]) -> dict[str, list]:
    """The packed samples, from their lists."""
    samples = [sample(i) for i in sample_ids]
    return {
        "sample_ids": sample_ids,
        "tokens": [token for prompt, response, _ in samples for token in prompt + response],
        "cu_seqlens": [0, *accumulate(len(prompt + response) for prompt, response, _ in samples)],
        "mask": [in_response for prompt, response, _ in samples for in_response in [False] * len(prompt) + [True] * len(response)],
        "log_probs": [bits for prompt, _, log_probs in samples
                      for bits in [0] * len(prompt) + [struct.unpack("i", struct.pack("f", x))[0] for x in log_probs]],
    }  # fmt: skip


def test_every_rank_gives_to_and_takes_from_every_rank(ranks):
    order = random.Random(7).sample(range(NUM_SAMPLES), NUM_SAMPLES)
    sources = [{i % WORLD_SIZE for i in order[4 * rank : 4 * rank + 4]} for rank in range(WORLD_SIZE)]
    assert all(len(of_rank) > 1 for of_rank in sources)  # or there would be nothing to put in order
    for rank in range(WORLD_SIZE):
        assert ranks[rank]["every_rank_to_every_rank"] == expected(order[4 * rank : 4 * rank + 4])


@pytest.mark.parametrize("rank, wanted", [(0, [4, 1]), (1, [4, 1]), (2, [5, 0, 3, 2])])
def test_a_rank_that_holds_nothing_takes_from_the_replicas_of_an_engine(ranks, rank, wanted):
    assert ranks[rank]["tensor_parallel_block"] == expected(wanted)


@pytest.mark.parametrize("rank, wanted", [(0, [1, 0]), (1, []), (2, [])])
def test_a_rank_may_end_up_with_nothing(ranks, rank, wanted):
    assert ranks[rank]["rank_without_samples"] == expected(wanted)


def test_without_a_move_there_is_no_message(ranks):
    assert ranks[0]["nothing_to_move"] == expected([3, 0, 2])


def test_the_kl_of_every_sample_reaches_the_group_statistics_of_other_ranks(ranks):
    # k1 of old = x against ref = 2x is -x per token, so with a factor of 1 a reward of 0 becomes the sum of x. fp32 sums of at most 9.
    sums = [sum(sample(i)[2]) for i in range(4)]
    mean = sum(sums) / 4
    for rank, mine in enumerate([[3, 1], [0, 2], []]):
        assert ranks[rank]["kl_of_all_samples"]["advantages"] == pytest.approx([sums[i] - mean for i in mine], abs=1e-6 * max(map(abs, sums)))
    metrics = [of_rank["kl_of_all_samples"]["metrics"] for of_rank in ranks]
    assert sum(m["kl/per_response"] for m in metrics) == pytest.approx(-mean, rel=1e-6)
    assert sum(m["kl/coef"] for m in metrics) == pytest.approx(1.0)


def test_every_scenario_is_judged(ranks):
    assert all(of_rank.keys() == {scenario.__name__ for scenario in SCENARIOS} for of_rank in ranks)
