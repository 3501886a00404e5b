"""`kl_estimate` by every backend: values and slopes against fp64, and what the docstring says of
expectations, by summing over a whole vocabulary."""

import math
from typing import get_args

import pytest
import torch

from megarl.kernels.kl import KLEstimator, kl_estimate, kl_estimate_ref

KINDS = get_args(KLEstimator)
NAN = math.nan


@pytest.fixture
def kernels(kernels, monkeypatch):
    """Blocks so small that there are several, and last ones that are not full."""
    if kernels != "torch":
        from megarl.kernels import kl_triton

        monkeypatch.setattr(kl_triton, "_BLOCK", 256)
    return kernels


def slopes(function, log_probs, ref_log_probs, kind, straight_through=False):
    log_probs = log_probs.clone().requires_grad_()
    values = function(log_probs, ref_log_probs, kind, straight_through)
    return values.detach(), torch.autograd.grad(values.sum(), log_probs)[0]


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-5, 1e-2, 0.3, 1.0, 10.0])
def test_against_fp64(kernels, kind, scale, straight_through):
    """Value within a few units in the last place of the difference, slope to full precision: autograd of
    exp(-d) + d in fp32 would be off by 1e-2 relative at differences of 1e-5. The rounding of d itself, common
    to all, is left out: both sides get d and 0. A GPU's exp is off by up to two units in the last place, and by
    one more for every two of its argument."""
    d, zero = scale * torch.randn(1000, generator=torch.Generator().manual_seed(0)), torch.zeros(1000)
    values, slope = slopes(kl_estimate, d, zero, kind, straight_through)
    expected, expected_slope = slopes(kl_estimate_ref, d.double(), zero.double(), kind, straight_through)
    eps = torch.finfo(torch.float32).eps
    assert values.dtype == slope.dtype == torch.float32
    assert ((values - expected).abs() <= 4 * eps * (d.abs() + expected.abs())).all()
    assert ((slope - expected_slope).abs() <= 4 * eps * expected_slope.abs()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(monkeypatch, kind):
    """fp64 on the PyTorch path."""
    monkeypatch.setenv("MEGARL_KERNELS", "torch")
    log_probs = torch.tensor([-3.0, -0.5, -1e-3, -25.0, -0.7], dtype=torch.float64, requires_grad=True)
    ref_log_probs = torch.tensor([-1.0, -0.6, -2e-3, -1.0, -30.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref_log_probs, kind), (log_probs,))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_policies_have_no_kl_and_extremes_stay_finite(kernels, kind):
    log_probs = torch.tensor([-0.3, -17.0, -1e4, -0.1])
    assert kl_estimate(log_probs, log_probs.clone(), kind).tolist() == [0, 0, 0, 0]
    values, slope = slopes(kl_estimate, torch.tensor([-1e4, -0.1]), torch.tensor([-0.1, -1e4]), kind)
    assert values.isfinite().all() and slope.isfinite().all()
    if kind == "k3":
        assert values.tolist() == [10, 10] and slope.tolist() == [0, 0]
        _, slope = slopes(kl_estimate, torch.tensor([-1e4, -0.1]), torch.tensor([-0.1, -1e4]), kind, True)
        assert slope.tolist() == pytest.approx([-1e4, 1e4], abs=0.2)


def test_limit_of_k3(kernels):
    """Just below and above exp(-d) - 1 + d = 10 on either side."""
    d = torch.tensor([-2.6, -2.62, 10.99, 11.01])
    values, slope = slopes(kl_estimate, d, torch.zeros(4), "k3")
    assert values.tolist() == pytest.approx([math.exp(2.6) - 3.6, 10, math.exp(-10.99) + 9.99, 10], rel=1e-6)
    assert slope.tolist() == pytest.approx([1 - math.exp(2.6), 0, 1 - math.exp(-10.99), 0], rel=1e-6)


@pytest.mark.parametrize("straight_through", [False, True])
def test_nan_is_not_hidden(kernels, straight_through):
    for kind in KINDS:
        values, slope = slopes(
            kl_estimate, torch.tensor([NAN, -1.0]), torch.tensor([-1.0, -0.5]), kind, straight_through
        )
        assert values[0].isnan() and (slope[0].isnan() or (kind == "k1" and not straight_through))
        assert values[1].isfinite() and slope[1].isfinite()


def test_non_contiguous_inputs_and_none(kernels):
    wide = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    for kind in KINDS:
        ours, theirs = (
            slopes(kl_estimate, *x, kind)
            for x in ((wide[:, 0], wide[:, 1]), (wide[:, 0].clone(), wide[:, 1].clone()))
        )
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
        assert slopes(kl_estimate, torch.zeros(0), torch.zeros(0), kind)[1].shape == (0,)


def test_expectations_of_values_and_gradients():
    """Exact expectations under the policy: E[k1] = E[k3] = KL; E[gradient] is 0 for k1, of KL(policy ||
    reference) for k2 and of KL(reference || policy) for k3. Straight through, all have that of KL(policy ||
    reference)."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), -1)
    policy = torch.log_softmax(logits, -1)
    reverse, forward = (policy.exp() * (policy - ref)).sum(), (ref.exp() * (ref - policy)).sum()
    expected = {
        "k1": torch.zeros(6, dtype=torch.float64),
        "k2": gradient(reverse, logits),
        "k3": gradient(forward, logits),
    }
    for kind in ("k1", "k2", "k3"):
        estimates = kl_estimate(policy, ref, kind)
        sampled = (
            policy.detach().exp() * estimates
        ).sum()  # the sampling is not differentiated, as in training
        torch.testing.assert_close(gradient(sampled, logits), expected[kind], atol=1e-12, rtol=0)
        if kind != "k2":
            torch.testing.assert_close(sampled, reverse, atol=1e-12, rtol=0)
        through = (policy.detach().exp() * kl_estimate(policy, ref, kind, straight_through=True)).sum()
        torch.testing.assert_close(through, sampled, atol=1e-12, rtol=0)
        torch.testing.assert_close(gradient(through, logits), gradient(reverse, logits), atol=1e-12, rtol=0)


def gradient(loss, logits):
    return torch.autograd.grad(loss, logits, retain_graph=True)[0]


@pytest.mark.parametrize(
    "kind, ref_log_probs, message",
    [
        ("k4", torch.zeros(2), r"kind \('k4'\) must be one of k1, abs, k2, k3"),
        ("k3", torch.zeros(3), r"ref_log_probs must be \[N\] like log_probs, got \[3\] with log_probs \[2\]"),
        ("k3", torch.zeros(2, requires_grad=True), r"ref_log_probs requires a gradient"),
    ],
)
def test_errors_name_the_value(kind, ref_log_probs, message):
    with pytest.raises(ValueError, match=message):
        kl_estimate(torch.zeros(2), ref_log_probs, kind)
