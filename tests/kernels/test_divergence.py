"""Divergences from a teacher in chunks of the output layer, and their gradients, against float64 autograd of
the plain formulas over whole logits.

`run_tensor_parallel.py` splits the vocabulary over ranks."""

import math

import pytest
import torch

from megarl.kernels import linear_head
from megarl.kernels.divergence import Divergence, TeacherHead, TeacherTopK, divergence_ref, teacher_top_k
from megarl.kernels.fused_linear_policy_loss import fused_linear_policy_loss
from megarl.kernels.linear_log_probs import linear_log_probs

KINDS = {
    "reverse": Divergence("reverse-kl"),
    "forward": Divergence("forward-kl"),
    "jsd": Divergence("jsd", 0.3),
    "jsd, nearly all teacher": Divergence("jsd", 0.99),
}
ROWS, VOCAB, COLUMNS, HIDDEN, TEACHER_HIDDEN = 23, 37, 40, 8, 12
TEMPERATURE = 0.7


def make_case(dtype=torch.float64):
    """Hidden states and output layers of student and teacher; the padding of the vocabulary is large."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)
    hidden, weight = draw(ROWS, HIDDEN), draw(COLUMNS, HIDDEN)
    teacher_hidden, teacher_weight = draw(ROWS, TEACHER_HIDDEN), draw(COLUMNS, TEACHER_HIDDEN)
    weight, teacher_weight = weight * 0.4, teacher_weight * 0.4
    weight[VOCAB:], teacher_weight[VOCAB:] = 50.0, 50.0
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    token_weights = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    tensors = [x.to(dtype) for x in (hidden, weight, teacher_hidden, teacher_weight)]
    return *tensors, targets, token_weights.to(dtype)


def options(group=None):
    return dict(vocab_size=VOCAB, group=group, temperature=TEMPERATURE)


def teacher_of(case, divergence, top_k):
    _, _, hidden, weight, targets, _ = case
    if top_k is None:
        return TeacherHead(hidden, weight, targets, divergence, **options())
    ids, log_probs = teacher_top_k(hidden, weight, targets, top_k, **options())
    return TeacherTopK(ids, log_probs, divergence)


def run(case, divergence, top_k, main_grad=None):
    """Loss, divergences, and gradients of hidden states and output layer."""
    hidden, weight, _, _, targets, token_weights = case
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    seen = torch.empty(ROWS, dtype=hidden.dtype)

    def loss(log_probs, divergences, rows):
        seen[rows] = divergences.detach()
        return (divergences * token_weights[rows]).sum(), {}

    teacher = teacher_of(case, divergence, top_k)
    out = fused_linear_policy_loss(
        hidden, weight, targets, loss, teacher=teacher, main_grad=main_grad, **options()
    )
    out.loss.backward()
    return out, seen, hidden.grad, weight.grad


def wanted(case, divergence, top_k):
    hidden, weight, teacher_hidden, teacher_weight, _, token_weights = (x.double() for x in case)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    values = divergence_ref(
        hidden @ weight.T,
        teacher_hidden @ teacher_weight.T,
        vocab_size=VOCAB,
        divergence=divergence,
        temperature=TEMPERATURE,
        top_k=top_k,
    )
    loss = (values * token_weights).sum()
    loss.backward()
    return loss.detach(), values.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("top_k", [None, 1, 5], ids=["whole vocabulary", "top 1", "top 5"])
@pytest.mark.parametrize("divergence", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("rows_per_chunk", [None, 4])
def test_values_and_gradients_are_those_of_the_formula(monkeypatch, divergence, top_k, rows_per_chunk):
    if rows_per_chunk:
        monkeypatch.setattr(linear_head.LinearHead, "rows_per_chunk", rows_per_chunk)
    case = make_case()
    out, seen, *gradients = run(case, divergence, top_k)
    loss, values, *wanted_gradients = wanted(case, divergence, top_k)
    # float64: some tens of roundings of numbers around 10
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-12)
    assert (seen - values).abs().max() < 1e-12 and values.min() > 0
    for gradient, want in zip(gradients, wanted_gradients):
        assert (gradient - want).abs().max() < 1e-12 * max(1, want.abs().max())
        assert want.abs().max() > 1e-4
    assert gradients[1][VOCAB:].abs().max() == 0
    hidden, weight, _, _, targets, _ = case
    same, _ = linear_log_probs(hidden, weight, targets, method="chunked", **options())
    assert torch.equal(out.log_probs, same)


@pytest.mark.parametrize("divergence", KINDS.values(), ids=KINDS.keys())
def test_fp32_is_right_to_rounding(divergence):
    case = make_case(torch.float32)
    for top_k in (None, 5):
        main_grad = torch.ones(COLUMNS, HIDDEN)
        out, _, of_hidden, of_weight = run(case, divergence, top_k, main_grad)
        loss, _, wanted_hidden, wanted_weight = wanted(case, divergence, top_k)
        # logits around 10 are right to 1e-6, and so are log-probs and what they weigh
        assert out.loss.item() == pytest.approx(loss.item(), rel=2e-6)
        assert (of_hidden - wanted_hidden).abs().max() < 2e-5 and of_weight is None
        assert (main_grad - 1 - wanted_weight).abs().max() < 2e-5


def test_merging_tokens_loses_divergence_and_all_tokens_lose_none():
    case = make_case()
    for divergence in KINDS.values():
        exact, *of_k = (run(case, divergence, k)[1] for k in (None, 1, 5, VOCAB - 1))
        for less, more in zip(of_k, [*of_k[1:], exact]):
            assert (less <= more + 1e-9).all()  # a small rest is a difference of larger numbers
        assert (of_k[-1] - exact).abs().max() < 1e-9  # one token is the rest


def test_jsd_at_its_ends_is_a_kl():
    case, small = make_case(), 1e-4
    for end, divergence in ((small, KINDS["forward"]), (1 - small, KINDS["reverse"])):
        jsd = run(case, Divergence("jsd", end), None)[1] / min(end, 1 - end)
        exact = run(case, divergence, None)[1]
        assert ((jsd - exact).abs() < 0.05 * exact + 0.05).all() and math.isfinite(float(jsd.sum()))


def test_no_rows():
    hidden, weight, teacher_hidden, teacher_weight, targets, _ = make_case()
    hidden = hidden[:0].requires_grad_()
    teacher = TeacherHead(teacher_hidden[:0], teacher_weight, targets[:0], KINDS["jsd"], **options())
    loss = lambda log_probs, divergences, rows: (divergences.sum(), {})
    out = fused_linear_policy_loss(hidden, weight, targets[:0], loss, teacher=teacher, **options())
    out.loss.backward()
    assert out.loss == 0 and hidden.grad.shape == (0, HIDDEN)
