"""Advantages of on-policy distillation against the gradient of the exact KL to a teacher.

pytest tests/algorithms/test_distill.py"""

import math

import pytest
import torch

from megarl.algorithms import REGISTRY, AdvantageInputs, LossInputs

Distill = REGISTRY["distill"]
OLD = [-0.5, -1.0, -0.1, -2.0, -0.3]
TEACHER = [-0.25, -3.0, -0.1, -0.5, -20.3]


def inputs(rewards=(0.0, 1.0), rows=(0, 1)):
    lengths = torch.tensor([3, 2])
    parts = [torch.tensor(column).split(lengths.tolist()) for column in (OLD, TEACHER)]
    old, teacher = (torch.cat([torch.zeros(0), *(column[row] for row in rows)]) for column in parts)
    return AdvantageInputs(
        rewards=torch.tensor(rewards),
        group_ids=torch.tensor([0, 1]),
        rows=torch.tensor(rows, dtype=torch.int64),
        response_lengths=lengths[list(rows)],
        kl_coef=0.0,
        sum_over_ranks=lambda values: values,
        sample_lengths=lengths,
        old_log_probs=old,
        ref_log_probs=teacher,
    )


def test_a_token_is_judged_by_the_teacher_alone():
    columns, metrics = Distill().compute_advantages(inputs())
    gaps = [teacher - old for old, teacher in zip(OLD, TEACHER)]
    assert columns["advantages"].tolist() == pytest.approx(gaps, rel=1e-6)
    assert metrics["distill/kl"] == pytest.approx(-sum(gaps) / 5, rel=1e-6)
    assert (
        columns["advantages"].tolist()
        == Distill().compute_advantages(inputs((1.0, -7.0)))[0]["advantages"].tolist()
    )
    clipped, of_clip = Distill(distill_clip=1.5).compute_advantages(inputs())
    assert clipped["advantages"].tolist() == pytest.approx([0.25, -1.5, 0, 1.5, -1.5], rel=1e-6)
    assert of_clip["distill/kl"] == metrics["distill/kl"]  # of the model, not of the loss


def test_a_failed_sample_is_left_out_and_ranks_add_up():
    columns, metrics = Distill().compute_advantages(inputs((math.nan, 1.0)))
    assert columns["advantages"].tolist()[:3] == [0, 0, 0] and metrics["reward/failed"] == 1
    assert metrics["distill/kl"] == pytest.approx((-1.5 + 20) / 2, rel=1e-6)
    both = [Distill().compute_advantages(inputs(rows=rows))[1]["distill/kl"] for rows in ((1,), (0,), ())]
    assert sum(both) == pytest.approx(Distill().compute_advantages(inputs())[1]["distill/kl"], rel=1e-6)


def test_the_mean_gradient_is_that_of_the_kl_to_the_teacher():
    """Over all tokens by their probability, in float64: E[A grad log pi] = -grad KL(pi || teacher)."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    log_pi, log_teacher = logits.log_softmax(-1), teacher.log_softmax(-1)
    (exact,) = torch.autograd.grad((log_pi.exp() * (log_pi - log_teacher)).sum(), logits, retain_graph=True)
    each = AdvantageInputs(
        rewards=torch.zeros(7),
        group_ids=torch.arange(7),
        rows=torch.arange(7),
        response_lengths=torch.ones(7, dtype=torch.int64),
        kl_coef=0.0,
        sum_over_ranks=lambda values: values,
        sample_lengths=torch.ones(7, dtype=torch.int64),
        old_log_probs=log_pi.detach(),
        ref_log_probs=log_teacher,
    )
    advantages = Distill().compute_advantages(each)[0]["advantages"]
    (sampled,) = torch.autograd.grad((log_pi.detach().exp() * advantages * log_pi).sum(), logits)
    torch.testing.assert_close(-sampled, exact, rtol=1e-12, atol=1e-14)


def test_the_update_measures_no_kl_to_the_teacher():
    """distill/kl is that number, before the updates. A KL in the loss needs --kl-mode, which is refused."""
    log_probs = torch.tensor(OLD)
    loss_inputs = LossInputs(
        log_probs=log_probs,
        old_log_probs=log_probs,
        rollout_log_probs=log_probs,
        ref_log_probs=torch.tensor(TEACHER),
        advantages=torch.tensor(TEACHER) - log_probs,
        response_lengths=torch.tensor([3, 3, 3, 2, 2]),
        num_tokens=5,
        num_sequences=2,
        max_response_length=8,
        kl_coef=0.0,
    )
    assert "policy/ref_kl" not in Distill().loss(loss_inputs)[1]
    assert "policy/ref_kl" in REGISTRY["grpo"](kl_mode="loss", kl_coef=0.1).loss(loss_inputs)[1]
