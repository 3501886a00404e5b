"""Advantages of --algorithm gdpo against the formula of its paper in a loop of float64 numbers, whole and spread
over ranks; scores that are not a sample's.

    pytest tests/algorithms/test_gdpo.py

Bound: 4e-6 relative to the largest advantage, as for the other whitened advantages."""

import dataclasses
import math
import random
import statistics

import pytest
import torch

from megarl.algorithms import REGISTRY, AdvantageInputs
from megarl.algorithms.base import ReferenceInputs
from megarl.algorithms.several_scores import StepScores, scores_of_step
from megarl.config.errors import ConfigError

GDPO, GRPO = REGISTRY["gdpo"], REGISTRY["grpo"]
BOUND = 4e-6


def inputs_of(rewards, groups, scores, weights, rows=None):
    lengths = torch.tensor([1 + i % 3 for i in range(len(rewards))])
    rows = torch.tensor(range(len(rewards)) if rows is None else rows, dtype=torch.int64)
    return AdvantageInputs(
        rewards=torch.tensor(rewards),
        group_ids=torch.tensor(groups),
        rows=rows,
        response_lengths=lengths[rows],
        kl_coef=0.0,
        sum_over_ranks=lambda values: values,
        sample_lengths=lengths,
        scores=StepScores(scores, weights),
    )


def by_the_paper(rewards, groups, scores, weights):
    """2601.05242: eq. 4 for each score, their weighted sum, eq. 6 over the step. Failed samples are left out."""
    sums = {}
    for i, group in enumerate(groups):
        if math.isnan(rewards[i]):
            continue
        members = [j for j, g in enumerate(groups) if g == group and not math.isnan(rewards[j])]
        sums[i] = 0.0
        for name, values in scores.items():
            of_group = [values[j] for j in members]
            if len(of_group) > 1:
                deviation = statistics.stdev(of_group) + 1e-4
                sums[i] += weights[name] * (values[i] - statistics.fmean(of_group)) / deviation
    mean = statistics.fmean(sums.values())
    variance = statistics.variance(sums.values()) if len(sums) > 1 else 0.0
    return [(sums[i] - mean) / math.sqrt(variance + 1e-8) if i in sums else 0.0 for i in range(len(rewards))]


def draw(rng):
    count = rng.randint(2, 24)
    groups = [rng.choice([3, 5, 11]) for _ in range(count)]
    weights = {"correct": 1.0, "short": rng.choice([0.2, -1.0, 3.0])}
    scores = {"correct": [rng.choice([0.0, 1.0]) for _ in range(count)]}
    scores["short"] = [rng.uniform(-1, 1) for _ in range(count)]
    rewards = [sum(w * scores[name][i] for name, w in weights.items()) for i in range(count)]
    for i in rng.sample(range(count), count // 6):
        rewards[i] = math.nan
        for values in scores.values():
            values[i] = math.nan
    return rewards, groups, scores, weights


def test_it_is_the_formula_and_its_own_reference():
    rng = random.Random(0)
    for _ in range(100):
        rewards, groups, scores, weights = draw(rng)
        wanted = by_the_paper(rewards, groups, scores, weights)
        inputs, count = inputs_of(rewards, groups, scores, weights), len(rewards)
        columns, _ = GDPO().compute_advantages(inputs)
        found = [part[0].item() for part in columns["advantages"].split(inputs.response_lengths.tolist())]
        assert found == pytest.approx(wanted, abs=BOUND * max(1, *map(abs, wanted)))
        reference = ReferenceInputs(
            rewards=dict(enumerate(rewards)),
            positions={s: s for s in range(count)},
            groups={s: [o for o in range(count) if groups[o] == groups[s]] for s in range(count)},
            samples=range(count),
            columns=lambda sample, name: torch.zeros(2),
            kl_coef=0.0,
            lengths=dict.fromkeys(range(count), 2),
            scores=inputs.scores,
        )
        reference = dataclasses.replace(reference, sums=GDPO().reference_sums(reference))
        for sample in range(count):
            column = GDPO().reference_advantages(reference, sample)["advantages"]
            assert [*column.values] == pytest.approx([wanted[sample]] * 2, abs=1e-9)
            eps = torch.finfo(torch.float32).eps
            assert abs(found[sample] - column.values[0]) <= 16 * eps * column.magnitudes[0]


def test_the_split_over_ranks_does_not_matter():
    rewards, groups, scores, weights = draw(random.Random(4))
    whole = GDPO().compute_advantages(inputs_of(rewards, groups, scores, weights))[0]["advantages"]
    order = [*range(1, len(rewards), 2), *range(0, len(rewards), 2)]
    parts = [order[: len(order) // 3], [], order[len(order) // 3 :]]
    inputs = [inputs_of(rewards, groups, scores, weights, part) for part in parts]
    found = torch.cat([GDPO().compute_advantages(one)[0]["advantages"] for one in inputs])
    split = whole.split([1 + i % 3 for i in range(len(rewards))])
    assert torch.equal(found, torch.cat([split[i] for i in order]))


def test_what_grpo_takes_for_equal_it_tells_apart():
    """The paper's figure 2: with equal weights (1, 0) and (0, 1) have one sum, but if the second score varies more
    often in the group, earning it is normalized differently."""
    scores = {"a": [1.0, 0.0, 0.0, 0.0], "b": [0.0, 1.0, 1.0, 0.0]}
    rewards, groups = [1.0, 1.0, 1.0, 0.0], [0] * 4
    inputs = inputs_of(rewards, groups, scores, {"a": 1.0, "b": 1.0})
    of_sum = GRPO().sample_advantages(inputs.rewards, inputs.group_ids, inputs.sample_lengths)
    found = GDPO().compute_advantages(inputs)[0]["advantages"][torch.tensor([0, 1])]
    assert of_sum[0] == of_sum[1] and found[0] > found[1] + 0.1


def test_one_score_is_grpo_whitened():
    rewards, groups = [1.0, 0.0, 0.5, 2.0, 3.0, 2.5], [0, 0, 0, 1, 1, 1]
    inputs = inputs_of(rewards, groups, {"reward": rewards}, {"reward": 1.0})
    of_group = GRPO().sample_advantages(inputs.rewards, inputs.group_ids, inputs.sample_lengths)
    whitened = (of_group - of_group.mean()) / of_group.std()
    found = GDPO().compute_advantages(inputs)[0]["advantages"]
    torch.testing.assert_close(found, inputs.spread(whitened), atol=1e-5, rtol=0)


IDS, GROUPS, WEIGHTS = [7, 8, 9], [0, 0, 1], {"a": 1.0, "b": 0.5}
SCORES = {"a": [1.0, 0.0, 2.0], "b": [1.0, 2.0, None]}


def test_scores_that_add_up_are_taken():
    found = scores_of_step(IDS, GROUPS, [1.5, None, 2.0], SCORES, WEIGHTS)
    assert found.of["a"][::2] == [1.0, 2.0] and math.isnan(found.of["a"][1]) and math.isnan(found.of["b"][2])


def test_scores_of_another_sample_are_an_error():
    swapped = {"a": [0.0, 1.0, 2.0], "b": [1.0, 2.0, None]}
    with pytest.raises(ValueError, match=r"sample 7 has the reward 1.5, and its scores are .*must add up"):
        scores_of_step(IDS, GROUPS, [1.5, 1.0, 2.0], swapped, WEIGHTS)


def test_a_name_that_one_response_lacks_is_an_error():
    lacking = {"a": [1.0, 1.0, 2.0], "b": [1.0, None, None]}
    with pytest.raises(ValueError, match=r"samples 7 and 8 .* \['a', 'b'\] and \['a'\]. A score that"):
        scores_of_step(IDS, GROUPS, [1.5, 1.0, 2.0], lacking, WEIGHTS)


@pytest.mark.parametrize("fields", [dict(kl_mode="reward", kl_coef=0.1), dict(overlong_buffer=8)])
def test_what_changes_the_reward_is_refused(fields):
    with pytest.raises((ConfigError, ValueError), match="learns from its single scores"):
        GDPO(**fields)
