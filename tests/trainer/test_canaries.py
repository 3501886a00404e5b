"""Canaries: what each engine must deliver, which differences are accepted, and what they leave as it is.

Planted faults in whole jobs: tests/faults/test_silent_faults.py.

    pytest tests/trainer/test_canaries.py"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.config.mesh import MeshSpec, shard_keys
from megarl.gate_limits import FP32, FP32_EXPERTS, GateLimits
from megarl.invariants import InvariantError
from megarl.packing import Sample, plan_mini_batches
from megarl.rollout.canaries import canary_length, canary_prompts, num_response_tokens
from megarl.trainer.canaries import canary_error, check_delivery
from megarl.workers.data import DataRole
from megarl.workers.store import RolloutBlock, RolloutSample, SampleStore

REQUIRED = "--algorithm grpo --model m --train-data d.jsonl --save s --train-iters 1 --staleness 1"


def delivered(num_engines: int = 2, count: int = 4, version: int = 5) -> list[Sample]:
    return [
        Sample(-1 - number, 70, 8, (number // count,), group=-1 - number, version=version, trained=False)
        for number in range(num_engines * count)
    ]


def test_every_engine_delivers_each_canary_once():
    check_delivery("rollout", delivered(), 2, 4, 5)
    check_delivery("rollout", delivered(3, 1), 3, 1, 5)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s[:-1], "engine 1 of rollout has delivered 3 of 4 canaries of version 5"),
        (lambda s: s[4:], "engine 0 of rollout has delivered 0 of 4 canaries of version 5"),
        (lambda s: [*s[:3], s[2], *s[4:]], "engine 0 of rollout has delivered 4 of 4 .* each one once"),
        (lambda s: [*s, s[-1]], "engine 1 of rollout has delivered 5 of 4"),
        (
            lambda s: [*s[:-1], replace(s[-1], version=4)],
            "engine 1 of rollout has sampled its canaries by version 4 and 5 of the weights, .* are version 5",
        ),
        (
            lambda s: [replace(s[0], version=4, version_runs=((4, 3), (5, 5))), *s[1:]],
            "engine 0 of rollout has sampled its canaries by version 4 and 5",
        ),
    ],
)
def test_a_missing_canary_and_a_wrong_version_are_errors_that_name_the_engine(change, message):
    with pytest.raises(InvariantError, match=message):
        check_delivery("rollout", change(delivered()), 2, 4, 5)


def tokens(gap: float, of_samples: int = 4) -> list[dict[str, float]]:
    """Eight tokens of each of four canaries. Trainer and engine differ by `gap` on those of some."""
    return [
        {
            "sample_id": -1 - number,
            "position": 60 + at,
            "token": 3,
            "trainer": -0.5,
            "engine": -0.5 + gap * (number < of_samples),
        }
        for number in range(4)
        for at in range(8)
    ]


def test_the_limits_of_the_gate_judge_one_engine():
    limits = GateLimits(unit=2e-7, unit_text="", multiples=FP32, mean_abs=None, max_abs=None)
    assert canary_error(tokens(3e-6), limits) is None
    for faulty in (1, 2, 4):
        error = canary_error(tokens(1e-3, faulty), limits)
        assert "canary/outliers" in error and "TOO LARGE" in error and "mismatch" not in error
    assert "32 sampled tokens" in canary_error(tokens(1e-3), limits)


def test_one_canary_may_choose_other_experts():
    limits = GateLimits(unit=2e-7, unit_text="", multiples=FP32_EXPERTS, mean_abs=None, max_abs=None)
    assert canary_error(tokens(0.5, of_samples=1), limits) is None
    assert "TOO LARGE" in canary_error(tokens(0.5, of_samples=2), limits)


@pytest.mark.parametrize(
    "flags, length",
    [
        ("--max-prompt-length 512", 260),  # two blocks of 128 tokens, and four
        ("--max-prompt-length 512 --rollout-block-size 32", 68),
        ("--max-prompt-length 64 --max-response-length 16 --rollout-block-size 32", 68),
        ("--max-prompt-length 32 --max-response-length 48", 72),  # all that the engine takes
        ("--max-prompt-length 64 --env e.py:E --max-context-length 200", 192),
        ("--max-prompt-length 32 --max-response-length 48 --env e.py:E --max-context-length 192", 184),
        ("--max-prompt-length 32 --max-response-length 48 --env e.py:E --max-context-length 400", 260),
    ],
)
def test_a_prompt_fills_two_blocks_if_the_engine_takes_so_many_tokens(flags, length):
    config = load_config(f"{REQUIRED} {flags}".split(), REGISTRY)
    assert canary_length(config, on_cpu=True) == length
    assert num_response_tokens(config) == 8
    assert length + 8 <= config.sampling.max_length


def test_prompts_are_neighbouring_rows_of_the_data():
    rows = [[10, 11], [20], [30, 31, 32]]
    found = canary_prompts(lambda row: rows[row], len(rows), 2, 7)
    assert found == [(0, [10, 11, 20, 30, 31, 32, 10]), (1, [20, 30, 31, 32, 10, 11, 20])]


def test_samples_that_are_not_trained_on_are_in_no_denominator():
    trained, canary = Sample(3, 20, 6, (0,)), delivered()[0]
    (mini_batch,) = plan_mini_batches([trained, canary], 2, {}, 1, 100, 64, None)
    assert (mini_batch.num_tokens, mini_batch.num_sequences) == (6, 1)
    assert sorted(mini_batch.samples_of(0)) == [-1, 3]


def test_canaries_lie_beside_the_batch_that_is_trained_on(monkeypatch):
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: pytest.fail("something was sent"))
    meshes = {"actor": MeshSpec((0,))}
    role = DataRole(SampleStore(), meshes, shard_keys(meshes), {"actor": 100}, has_versions=True)

    def made(number: int) -> RolloutSample:
        return RolloutSample(number, 0, number, [2, 2], [5], [1, 2], [-0.5, -1.0])

    sample, canary = made(0).record((0,)), replace(made(-1).record((0,)), trained=False)
    for source, number in (("train", 0), ("canary", -1), ("canary", -2)):
        role.store.source(source).add(RolloutBlock([made(number)]))
    role.distribute("actor", [sample], plan_mini_batches([sample], 1, {}, 1, 100, 64, None))
    for one in (canary, replace(canary, sample_id=-2, group=-2)):  # of two steps
        role.distribute("actor", [one], plan_mini_batches([one], 1, {}, 1, 100, 64, None), "canary")
        assert role.store.batch("actor canaries").batch.sample_ids.tolist() == [one.sample_id]
        assert role.store.batch("actor").batch.sample_ids.tolist() == [0]
    assert role.store.batch("actor canaries").batch.weight_versions.tolist() == [0, 2, 2]
    assert [*role.store.layouts["actor"].samples] == [0]
