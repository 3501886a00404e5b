"""`kl_estimate`: values and slopes against fp64, and what the docstring says of expectations, by summing over a whole vocabulary."""

import pytest
import torch

from megarl.kernels.kl import kl_estimate, kl_estimate_ref

KINDS = ["k1", "k2", "k3"]


def slopes(function, log_probs, ref_log_probs, kind):
    log_probs = log_probs.clone().requires_grad_()
    values = function(log_probs, ref_log_probs, kind)
    return values.detach(), torch.autograd.grad(values.sum(), log_probs)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-5, 1e-2, 1.0, 10.0])
def test_against_fp64(kind, scale):
    """Value within a few units in the last place of the difference, slope to full precision: autograd of exp(-d) + d in fp32
    would be off by 1e-2 relative at differences of 1e-5."""
    generator = torch.Generator().manual_seed(0)
    ref_log_probs = -torch.rand(1000, generator=generator)
    log_probs = ref_log_probs + scale * torch.randn(1000, generator=generator)
    values, slope = slopes(kl_estimate, log_probs, ref_log_probs, kind)
    # The rounding of d itself, common to all, is left out: both sides get the same d and 0.
    d, zero = log_probs - ref_log_probs, torch.zeros(1000)
    values, slope = slopes(kl_estimate, d, zero, kind)
    expected, expected_slope = slopes(kl_estimate_ref, d.double(), zero.double(), kind)
    eps = torch.finfo(torch.float32).eps
    assert ((values - expected).abs() <= 2 * eps * (d.abs() + expected.abs())).all()
    assert ((slope - expected_slope).abs() <= 4 * eps * expected_slope.abs()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    log_probs = torch.tensor([-3.0, -0.5, -1e-3, -25.0, -0.7], dtype=torch.float64, requires_grad=True)
    ref_log_probs = torch.tensor([-1.0, -0.6, -2e-3, -1.0, -30.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref_log_probs, kind), (log_probs,))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_policies_have_no_kl_and_extremes_stay_finite(kind):
    log_probs = torch.tensor([-0.3, -17.0, -1e4, -0.1])
    assert kl_estimate(log_probs, log_probs.clone(), kind).tolist() == [0, 0, 0, 0]
    values, slope = slopes(kl_estimate, torch.tensor([-1e4, -0.1]), torch.tensor([-0.1, -1e4]), kind)
    assert values.isfinite().all() and slope.isfinite().all()
    if kind == "k3":
        assert slope[0] == 0 and slope[1] == 1  # limited, and 1 - exp(-1e4)


def test_nan_is_not_hidden():
    for kind in KINDS:
        values, slope = slopes(kl_estimate, torch.tensor([float("nan")]), torch.tensor([-1.0]), kind)
        assert values.isnan().all() and (slope.isnan().all() or kind == "k1")


def test_expectations_of_values_and_gradients():
    """Exact expectations under the policy: E[k1] = E[k3] = KL; E[gradient] is 0 for k1, of KL(policy || reference) for k2 and of
    KL(reference || policy) for k3."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), -1)
    policy = torch.log_softmax(logits, -1)
    reverse, forward = (policy.exp() * (policy - ref)).sum(), (ref.exp() * (ref - policy)).sum()
    expected = {"k1": torch.zeros(6, dtype=torch.float64), "k2": gradient(reverse, logits), "k3": gradient(forward, logits)}
    for kind in KINDS:
        estimates = kl_estimate(policy, ref, kind)
        sampled = (policy.detach().exp() * estimates).sum()  # the sampling is not differentiated, as in training
        torch.testing.assert_close(gradient(sampled, logits), expected[kind], atol=1e-12, rtol=0)
        if kind != "k2":
            torch.testing.assert_close(sampled, reverse, atol=1e-12, rtol=0)


def gradient(loss, logits):
    return torch.autograd.grad(loss, logits, retain_graph=True)[0]


@pytest.mark.parametrize(
    "kind, ref_log_probs, message",
    [
        ("k4", torch.zeros(2), r"kind \('k4'\) must be one of k1, k2, k3"),
        ("k3", torch.zeros(3), r"ref_log_probs must be \[2\].*\[3\]"),
        ("k3", torch.zeros(2, requires_grad=True), r"ref_log_probs requires a gradient"),
    ],
)
def test_errors_name_the_value(kind, ref_log_probs, message):
    with pytest.raises(ValueError, match=message):
        kl_estimate(torch.zeros(2), ref_log_probs, kind)
