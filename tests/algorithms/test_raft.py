"""Which responses RAFT keeps, against a plain loop, and that its gradient is that of fine-tuning on them.

pytest tests/algorithms/test_raft.py"""

import dataclasses
import math
import random

import pytest
import torch

from megarl.algorithms import REGISTRY, AdvantageInputs, LossInputs
from megarl.algorithms.base import ReferenceInputs

RAFT = REGISTRY["raft"]


def inputs_of(rewards, groups, rows=None, lengths=None):
    lengths = torch.tensor(lengths or [2] * len(rewards))
    rows = list(range(len(rewards))) if rows is None else rows
    return AdvantageInputs(
        rewards=torch.tensor(rewards),
        group_ids=torch.tensor(groups),
        rows=torch.tensor(rows, dtype=torch.int64),
        response_lengths=lengths[rows],
        kl_coef=0.0,
        sum_over_ranks=lambda values: values,
        sample_lengths=lengths,
    )


def kept(rewards, groups, keep, least):
    """Samples that are kept, group by group, by sorting."""
    found = set()
    for group in set(groups):
        members = [s for s, g in enumerate(groups) if g == group and not math.isnan(rewards[s])]
        best = sorted(members, key=lambda s: (-rewards[s], s))[:keep]
        found |= {s for s in best if least is None or rewards[s] >= least}
    return found


def test_the_best_of_each_group_are_kept():
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randint(1, 30)
        rewards = [rng.choice([0.0, 0.5, 1.0, -1.0, math.nan]) for _ in range(count)]
        groups = [rng.choice([3, 5, 11]) for _ in range(count)]
        keep, least = rng.randint(1, 4), rng.choice([None, 0.5])
        algorithm, inputs = RAFT(raft_keep=keep, raft_min_reward=least), inputs_of(rewards, groups)
        wanted = kept(rewards, groups, keep, least)
        left_out = algorithm.left_out(inputs).tolist()
        assert {s for s, is_out in enumerate(left_out) if not is_out} == wanted
        columns, metrics = algorithm.compute_advantages(inputs)
        assert columns["advantages"].tolist() == [float(s in wanted) for s in range(count) for _ in range(2)]
        assert metrics["raft/kept"] == len(wanted)
        mean = sum(rewards[s] for s in wanted) / max(len(wanted), 1)
        assert metrics["raft/reward"] == pytest.approx(mean)
        reference = ReferenceInputs(
            rewards=dict(enumerate(rewards)),
            positions={s: s for s in range(count)},
            groups={s: [o for o in range(count) if groups[o] == groups[s]] for s in range(count)},
            samples=range(count),
            columns=lambda sample, name: torch.zeros(2),
            kl_coef=0.0,
            lengths=dict.fromkeys(range(count), 2),
        )
        for sample in range(count):
            expected = algorithm.reference_advantages(reference, sample)["advantages"].values
            assert expected == [float(sample in wanted)] * 2


def test_ranks_add_up_to_the_step():
    rewards, groups = [1.0, 0.0, 0.5, 2.0], [0, 0, 1, 1]
    parts = [
        RAFT().compute_advantages(inputs_of(rewards, groups, rows))[1] for rows in ([0, 2], [3], [1], [])
    ]
    assert sum(part["raft/kept"] for part in parts) == 2 and sum(part["raft/reward"] for part in parts) == 1.5


def test_the_mean_reward_is_that_before_shaping():
    """Responses are kept by their rewards after shaping, and reported by those that were given."""
    inputs = inputs_of([0.5, 0.25, 1.0], [3, 3, 5])
    inputs = dataclasses.replace(inputs, given_rewards=torch.tensor([0.75, 1.0, 2.0]))
    _, metrics = RAFT().compute_advantages(inputs)
    assert metrics["raft/kept"] == 2 and metrics["raft/reward"] == (0.75 + 2.0) / 2


def test_the_loss_is_that_of_fine_tuning_on_what_is_kept():
    """The worker hands it the tokens of kept samples and their counts."""
    log_probs = torch.tensor([-0.5, -1.0, -2.0, -0.25], requires_grad=True)
    inputs = LossInputs(
        log_probs=log_probs,
        old_log_probs=torch.tensor([-3.0, -1.0, -0.5, -0.25]),  # whatever it was
        rollout_log_probs=torch.zeros(4),
        advantages=torch.ones(4),
        response_lengths=torch.tensor([3, 3, 3, 1]),
        sequence_ids=torch.tensor([0, 0, 0, 1]),
        num_tokens=4,
        num_sequences=2,
        max_response_length=8,
        kl_coef=0.0,
    )
    loss, _ = RAFT().loss(inputs)
    loss.backward()
    assert (
        loss.item() == pytest.approx(-log_probs.sum().item() / 4) and log_probs.grad.tolist() == [-0.25] * 4
    )


def test_a_kl_that_no_reward_counts_is_refused():
    with pytest.raises(ValueError, match=r"kl_mode \(reward\): is not for raft: .* Try --kl-mode loss"):
        RAFT(kl_mode="reward", kl_coef=0.1)
    assert RAFT(kl_mode="loss", kl_coef=0.1).needs_reference
