"""`policy_loss`: loss and hand-made gradient against autograd of the fp64 specification, statistics against counting by hand.

Bound: a token's loss and gradient are products of three fp32 numbers, one rounding each, and the ratio has the error of
log_probs - old_log_probs, rounded once: half a unit in the last place of up to 8, 2 eps. In all 8 eps of the unclipped loss.
"""

import math

import pytest
import torch

from megarl.kernels.policy_loss import policy_loss, policy_loss_ref

CLIPS = {
    "ppo": dict(clip_eps_low=0.2, clip_eps_high=0.2),
    "dapo": dict(clip_eps_low=0.2, clip_eps_high=0.28),
    "dual": dict(clip_eps_low=0.2, clip_eps_high=0.28, clip_ratio_c=3.0),
}
EPS = torch.finfo(torch.float32).eps


def make_tokens(num_tokens=4000, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_tokens)
    old_log_probs = -3 * torch.rand(num_tokens, generator=generator, dtype=dtype)
    scale = torch.tensor([1e-4, 0.3, 2.0], dtype=dtype)[torch.arange(num_tokens) % 3]
    log_probs = old_log_probs + scale * torch.randn(num_tokens, generator=generator, dtype=dtype)
    advantages = torch.randn(num_tokens, generator=generator, dtype=dtype)
    advantages[::17] = 0
    weights = torch.rand(num_tokens, generator=generator, dtype=dtype) / max(num_tokens, 1)
    return log_probs, old_log_probs, advantages, weights


def run(function, log_probs, *constants, **clips):
    log_probs = log_probs.clone().requires_grad_()
    result = function(log_probs, *constants, **clips)
    loss = result[0] if isinstance(result, tuple) else result
    return loss.detach(), torch.autograd.grad(loss, log_probs)[0], result


@pytest.mark.parametrize("clips", CLIPS.values(), ids=CLIPS)
def test_loss_and_gradient_against_fp64(clips):
    tokens = make_tokens()
    loss, gradient, _ = run(policy_loss, *tokens, **clips)
    expected, expected_gradient, _ = run(policy_loss_ref, *tokens, **clips)
    log_probs, old_log_probs, advantages, weights = tokens
    magnitude = (advantages * weights * (log_probs - old_log_probs).exp()).abs()
    assert abs(loss - expected) <= 8 * EPS * magnitude.sum()
    assert ((gradient - expected_gradient).abs() <= 8 * EPS * magnitude).all()


@pytest.mark.parametrize("clips", CLIPS.values(), ids=CLIPS)
def test_gradcheck(clips):
    """fp64, no token near a kink: the nearest is 0.02 away, the step 1e-6."""
    log_ratio = torch.tensor([-2.0, -0.3, -0.2, -0.05, 0.0, 0.1, 0.21, 0.3, 0.9, 1.3, 2.0], dtype=torch.float64).repeat(2)
    advantages = torch.tensor([1.5] * 11 + [-0.7] * 11, dtype=torch.float64)
    old_log_probs = torch.full_like(log_ratio, -2.5)
    weights = torch.linspace(0.5, 1, 22, dtype=torch.float64)
    loss = lambda x: policy_loss(x, old_log_probs, advantages, weights, **clips)[0]
    assert torch.autograd.gradcheck(loss, ((old_log_probs + log_ratio).requires_grad_(),))


def test_statistics_by_hand():
    """Ratios 1/2, 1, 3/2 and 4, each with advantage 1 and -1, clip to [0.8, 1.28], dual clip at 3."""
    ratios = torch.tensor([0.5, 1.0, 1.5, 4.0] * 2)
    advantages = torch.tensor([1.0] * 4 + [-1.0] * 4)
    old_log_probs = torch.full((8,), -2.0)
    arguments = (old_log_probs + ratios.log(), old_log_probs, advantages, torch.ones(8))
    loss, gradient, (_, stats) = run(policy_loss, *arguments, **CLIPS["dual"])
    # A = 1: 0.5, 1, 1.28, 1.28 with a minus; A = -1: 0.8, 1, 1.5, 3.
    assert loss.item() == pytest.approx(-4.06 + 6.3, rel=1e-6)
    assert gradient.tolist() == pytest.approx([-0.5, -1, 0, 0, 0, 1, 1.5, 0], rel=1e-6)
    assert stats.num_clipped == 3 and stats.num_dual_clipped == 1
    assert stats.ratio_deviation_max.item() == pytest.approx(3, rel=1e-6)
    assert stats.kl_sum.item() == pytest.approx(2 * sum(r - 1 - math.log(r) for r in (0.5, 1, 1.5, 4)), rel=1e-6)
    assert policy_loss(*arguments, **CLIPS["dapo"])[1].num_dual_clipped == 0
    of_the_halves = policy_loss(*(x[::4] for x in arguments), **CLIPS["dapo"])[1]
    assert of_the_halves.ratio_deviation_max.item() == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("clips", [*CLIPS.values(), dict(clip_eps_low=0.0, clip_eps_high=0.0)])
def test_on_policy_is_exactly_reinforce(clips):
    """ratio 1: nothing clipped, nothing deviates, and the gradient is -A weight to the last bit."""
    log_probs, _, advantages, weights = make_tokens()
    loss, gradient, (_, stats) = run(policy_loss, log_probs, log_probs.clone(), advantages, weights, **clips)
    assert torch.equal(gradient, -advantages * weights)
    assert loss == (-advantages * weights).sum()
    assert stats.num_clipped == stats.num_dual_clipped == stats.kl_sum == stats.ratio_deviation_max == 0


def test_incoming_gradient_scales_and_statistics_carry_none():
    tokens = make_tokens(30)
    log_probs = tokens[0].clone().requires_grad_()
    loss, stats = policy_loss(log_probs, *tokens[1:], **CLIPS["ppo"])
    (128 * loss).backward()
    torch.testing.assert_close(log_probs.grad, 128 * run(policy_loss, *tokens, **CLIPS["ppo"])[1], rtol=0, atol=0)
    assert not any(value.requires_grad for value in stats)


def test_runaway_ratios_stay_finite_without_gradient():
    log_probs, old_log_probs = torch.tensor([-0.1, -500.0]), torch.tensor([-500.0, -0.1])
    loss, gradient, _ = run(policy_loss, log_probs, old_log_probs, -torch.ones(2), torch.ones(2), clip_eps_low=1.0, clip_eps_high=9.9)
    assert loss.item() == pytest.approx(math.exp(20) + math.exp(-20), rel=1e-5) and gradient.tolist() == [0, 0]


def test_nan_is_not_hidden():
    values = torch.tensor([math.nan, -1.0])
    loss, gradient, _ = run(policy_loss, values, torch.tensor([-1.0, -1.0]), torch.ones(2), torch.ones(2), **CLIPS["dual"])
    assert loss.isnan() and gradient[0].isnan() and gradient[1] == -1


def test_no_tokens():
    loss, gradient, (_, stats) = run(policy_loss, *make_tokens(0), **CLIPS["dual"])
    assert loss == 0 and gradient.shape == (0,) and all(value == 0 for value in stats)


def test_only_the_gradient_is_kept():
    kept = []
    log_probs, *constants = make_tokens(1000)
    log_probs.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()), lambda x: x):
        policy_loss(log_probs, *constants, **CLIPS["dual"])
    assert kept == [1000]


@pytest.mark.parametrize("position, name", [(1, "old_log_probs"), (2, "advantages"), (3, "weights")])
def test_errors_name_the_tensor(position, name):
    tokens = list(make_tokens(6))
    tokens[position] = tokens[position].requires_grad_()
    with pytest.raises(ValueError, match=rf"{name} requires a gradient"):
        policy_loss(*tokens, **CLIPS["ppo"])
    tokens[position] = torch.zeros(5)
    with pytest.raises(ValueError, match=rf"{name} must be \[N\] like log_probs, got \[5\] with log_probs \[6\]"):
        policy_loss(*tokens, **CLIPS["ppo"])
