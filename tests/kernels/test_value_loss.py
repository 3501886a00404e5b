"""`value_loss` by every backend: loss and gradient against autograd of the fp64 specification.

Bound: the error values - returns is rounded once, its square and the product with the weight once each: 8 eps
of the larger square."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.kernels.value_loss import value_loss, value_loss_ref

EPS = torch.finfo(torch.float32).eps
NAN = math.nan


@pytest.fixture
def kernels(kernels, monkeypatch):
    """Blocks so small that there are several, and last ones that are not full."""
    if kernels != "torch":
        from megarl.kernels import partial_sums_triton, value_loss_triton

        monkeypatch.setattr(value_loss_triton, "_BLOCK", 64)
        monkeypatch.setattr(partial_sums_triton, "_BLOCK", 4)
    return kernels


def make_tokens(num_tokens=700, dtype=torch.float32):
    """(values, old_values, returns, weights): moved by less and by more than the clip, towards the return and
    away from it."""
    generator = torch.Generator().manual_seed(num_tokens)
    normal = lambda: torch.randn(num_tokens, generator=generator, dtype=dtype)  # noqa: E731
    old_values = normal()
    values = old_values + torch.tensor([1e-3, 0.5], dtype=dtype)[torch.arange(num_tokens) % 2] * normal()
    weights = (0.1 + torch.rand(num_tokens, generator=generator, dtype=dtype)) / max(num_tokens, 1)
    weights[5::11] = 0
    return values, old_values, normal(), weights


def run(columns, clip_eps, function=value_loss):
    values = columns[0].clone().requires_grad_()
    result = function(values, *columns[1:], clip_eps=clip_eps)
    loss, stats = result if isinstance(result, tuple) else (result, None)
    return loss.detach(), torch.autograd.grad(loss, values)[0], stats


@pytest.mark.parametrize("num_tokens", [0, 1, 64, 65, 700])
@pytest.mark.parametrize("clip_eps", [None, 0.2])
def test_against_fp64(kernels, clip_eps, num_tokens):
    columns = make_tokens(num_tokens)
    (loss, gradient, stats), (expected, expected_gradient, _) = (
        run(columns, clip_eps),
        run(columns, clip_eps, value_loss_ref),
    )
    values, old_values, returns, weights = columns
    magnitude = (
        weights
        * torch.maximum((values - returns).abs(), values.abs() + returns.abs() + old_values.abs()) ** 2
    )
    assert loss.dtype == gradient.dtype == torch.float32
    assert abs(loss - expected) <= 8 * EPS * magnitude.sum()
    assert ((gradient - expected_gradient).abs() <= 4 * EPS * weights * (values.abs() + returns.abs())).all()
    exists = weights != 0
    error, target = (values - returns)[exists].double(), returns[exists].double()
    counted = [error.sum(), error.square().sum(), target.sum(), target.square().sum()]
    torch.testing.assert_close(torch.stack(stats[1:]).double(), torch.stack(counted), rtol=1e-5, atol=1e-4)
    if clip_eps and num_tokens == 700:
        assert 30 < stats.num_clipped == (gradient[exists] == 0).sum() < 300


def test_by_hand(kernels):
    """Old 0, clip 1/2. To 1, return 2: both 1 and clipped 9/4, no gradient. To 1, return 0: the plain loss is
    larger, 1 to 1/4."""
    columns = (
        torch.tensor([1.0, 1.0, 0.25]),
        torch.zeros(3),
        torch.tensor([2.0, 0.0, 1.25]),
        torch.tensor([1.0, 1.0, 2.0]),
    )
    loss, gradient, stats = run(columns, 0.5)
    assert loss == (2.25 + 1 + 2 * 1) / 2 and gradient.tolist() == [0, 1, -2] and stats.num_clipped == 1
    assert stats[1:] == (-1.0, 3.0, 3.25, 4 + 1.25**2)
    loss, gradient, stats = run(columns, None)
    assert loss == (1 + 1 + 2 * 1) / 2 and gradient.tolist() == [-1, 1, -2] and stats.num_clipped == 0


@pytest.mark.parametrize("clip_eps", [None, 0.2])
def test_gradcheck(monkeypatch, clip_eps):
    """fp64 on the PyTorch path, no value within 1e-3 of a kink."""
    monkeypatch.setenv("MEGARL_KERNELS", "torch")
    old_values = torch.linspace(-1, 1, 12, dtype=torch.float64)
    values = (
        old_values + torch.tensor([0.05, 0.31, -0.4, -0.1], dtype=torch.float64).repeat(3)
    ).requires_grad_()
    returns = torch.tensor([1.5, -1.7, 0.23], dtype=torch.float64).repeat_interleave(4)
    weights = torch.linspace(0.5, 1, 12, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, old_values, returns, weights, clip_eps=clip_eps)[0], (values,)
    )


def test_unmoved_values_keep_their_gradient(kernels):
    """old + (value - old) rounds to something other than value: that is not a clip."""
    values, _, returns, weights = make_tokens()
    values, returns = 1e-3 * values, 1e-3 * returns
    old_values = values + torch.tensor([0.0, 3e-8, 0.1])[torch.arange(700) % 3]
    _, gradient, stats = run((values, old_values, returns, weights), 0.2)
    assert stats.num_clipped == 0 and torch.equal(gradient, (values - returns) * weights)


def test_repeatable_and_a_token_does_not_depend_on_the_others(kernels):
    columns = make_tokens(300)
    loss, gradient, stats = run(columns, 0.2)
    again = run(columns, 0.2)
    assert torch.equal(again[0], loss) and torch.equal(again[1], gradient) and again[2] == stats
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    permuted = run([x[order] for x in columns], 0.2)
    assert torch.equal(permuted[1], gradient[order])
    torch.testing.assert_close(permuted[0], loss, rtol=1e-6, atol=0)
    wide = run([torch.stack([x, x.flip(0)], 1)[:, 0] for x in columns], 0.2)
    assert torch.equal(wide[0], loss) and torch.equal(wide[1], gradient)


def test_nan_is_not_hidden_does_not_spread_and_is_not_read_where_nothing_exists(kernels):
    columns = make_tokens(130)
    clean = run(columns, 0.2)
    for garbage in (NAN, math.inf):
        for column in columns[:3]:
            column[columns[3] == 0] = garbage
        assert torch.equal(run(columns, 0.2)[1], clean[1]) and run(columns, 0.2)[2] == clean[2]
    for column in (0, 2):
        poisoned = [x.clone() for x in columns]
        poisoned[column][70] = NAN
        loss, gradient, stats = run(poisoned, 0.2)
        others = torch.arange(130) != 70
        assert (
            loss.isnan()
            and gradient[70].isnan()
            and stats.error_sum.isnan()
            and torch.equal(gradient[others], clean[1][others])
        )


def test_incoming_gradient_scales_and_only_the_gradient_is_kept(kernels):
    columns, kept = make_tokens(130), []
    values = columns[0].clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        loss, stats = value_loss(values, *columns[1:], clip_eps=0.2)
    (128 * loss).backward()
    torch.testing.assert_close(values.grad, 128 * run(columns, 0.2)[1], rtol=0, atol=0)
    assert kept == [130] and not any(value.requires_grad for value in stats)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(returns=torch.zeros(5)), r"returns must be \[N\] like values, got \[5\] with values \[6\]"),
        (
            dict(weights=torch.zeros(6, requires_grad=True)),
            r"weights requires a gradient.*weights.detach\(\)",
        ),
        (dict(clip_eps=0.0), r"clip_eps \(0.0\) must be above 0, e.g. 0.2, or None"),
    ],
)
def test_errors_name_the_value(change, message):
    arguments = dict(
        values=torch.zeros(6),
        old_values=torch.zeros(6),
        returns=torch.zeros(6),
        weights=torch.zeros(6),
        clip_eps=0.2,
    )
    with pytest.raises(ValueError, match=message):
        value_loss(**arguments | change)
