"""`policy_loss` by every backend: loss and gradients against autograd of the fp64 specification, statistics
against counting by hand.

Bound: a token's loss and gradient are products of three fp32 numbers, one rounding each, and the ratio has
the error of log_probs - old_log_probs, rounded once: half a unit in the last place of up to 8, 2 eps. In all
8 eps of the unclipped loss, and of each term that is added."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import get_args

import pytest
import torch

from megarl.kernels.kl import KLEstimator
from megarl.kernels.policy_loss import PolicyLossOptions, policy_loss, policy_loss_ref

PPO = PolicyLossOptions(clip_eps_low=0.2, clip_eps_high=0.2)
DAPO = PolicyLossOptions(clip_eps_low=0.2, clip_eps_high=0.28)
DUAL = dataclasses.replace(DAPO, clip_ratio_c=3.0)
CISPO = PolicyLossOptions(kind="cispo", clip_eps_low=1.0, clip_eps_high=0.28)
KINDS = {"ppo": PPO, "dapo": DAPO, "dual": DUAL, "cispo": CISPO}
EPS = torch.finfo(torch.float32).eps
NAN = math.nan
HALF = [(None, 0.0, 0.0), (None, 0.3, 0.2), (1.2, 0.0, 0.2), (1.2, 0.3, 0.0)]
"""tis_clip, entropy_coef and kl_coef: four of eight choices, in which every two terms meet, on and off."""
OTHER_HALF = [
    choice for choice in itertools.product((None, 1.2), (0.0, 0.3), (0.0, 0.2)) if choice not in HALF
]
EXTRA = ("rollout_log_probs", "ref_log_probs", "entropy")


@pytest.fixture
def kernels(kernels, monkeypatch):
    """Blocks so small that there are several, and last ones that are not full."""
    if kernels != "torch":
        from megarl.kernels import partial_sums_triton, policy_loss_triton

        monkeypatch.setattr(policy_loss_triton, "_BLOCK", 64)
        monkeypatch.setattr(partial_sums_triton, "_BLOCK", 4)
    return kernels


def make_tokens(num_tokens=700, dtype=torch.float32):
    """(columns, extra columns), with ratios near 1, around the clips and far beyond, and some tokens that do
    not exist."""
    generator = torch.Generator().manual_seed(num_tokens)
    normal = lambda: torch.randn(num_tokens, generator=generator, dtype=dtype)  # noqa: E731
    old = -3 * torch.rand(num_tokens, generator=generator, dtype=dtype)
    log_probs = old + torch.tensor([1e-4, 0.3, 2.0], dtype=dtype)[torch.arange(num_tokens) % 3] * normal()
    advantages = normal()
    advantages[::17] = 0
    weights = (0.1 + torch.rand(num_tokens, generator=generator, dtype=dtype)) / max(num_tokens, 1)
    weights[5::11] = 0
    ref = log_probs + torch.tensor([1e-4, 1.5], dtype=dtype)[torch.arange(num_tokens) % 2] * normal()
    extra = (old + 0.5 * normal(), ref, normal().abs())
    return (log_probs, old, advantages, weights), dict(zip(EXTRA, extra))


def run(function, columns, options, extra=None):
    """(loss, gradient to log_probs, gradient to entropy or None, statistics or None)."""
    log_probs, *constants = columns
    extra = dict(extra or {})
    leaves = [log_probs.clone().requires_grad_()]
    if "entropy" in extra:
        leaves.append(extra["entropy"].clone().requires_grad_())
        extra["entropy"] = leaves[1]
    result = function(leaves[0], *constants, options, **extra)
    loss, stats = result if isinstance(result, tuple) else (result, None)
    gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return loss.detach(), gradients[0], gradients[1] if len(leaves) > 1 else None, stats


@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65, 700])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_loss_and_gradient_against_fp64(kernels, options, num_tokens):
    columns, _ = make_tokens(num_tokens)
    loss, gradient, _, _ = run(policy_loss, columns, options)
    expected, expected_gradient, _, _ = run(policy_loss_ref, columns, options)
    log_probs, old_log_probs, advantages, weights = columns
    magnitude = (
        advantages
        * weights
        * (log_probs - old_log_probs).exp()
        * (1 + log_probs.abs() * (options.kind == "cispo"))
    ).abs()
    assert loss.dtype == gradient.dtype == torch.float32 and gradient.shape == (num_tokens,)
    assert abs(loss - expected) <= 8 * EPS * magnitude.sum()
    assert ((gradient - expected_gradient).abs() <= 8 * EPS * magnitude).all()
    assert (gradient[weights == 0] == 0).all()


@pytest.mark.nightly_but_one_in(3)
@pytest.mark.parametrize("kl", [*itertools.product(get_args(KLEstimator), (False, True)), None], ids=str)
@pytest.mark.parametrize("kind", ["dual", "cispo"])
@pytest.mark.parametrize(
    "terms", [HALF, pytest.param(OTHER_HALF, marks=pytest.mark.nightly)], ids=["half", "other"]
)
def test_everything_at_once_against_fp64(kernels, terms, kind, kl):
    """KL, entropy and truncated importance sampling, alone and together; statistics that enter no loss are
    computed all the same."""
    columns, extra = make_tokens(200)
    exists = columns[3] != 0
    for tis_clip, entropy_coef, kl_coef in terms:
        kl_coef = kl_coef if kl else 0.0
        estimator, straight_through = kl or ("k3", False)
        options = dataclasses.replace(
            KINDS[kind],
            tis_clip=tis_clip,
            entropy_coef=entropy_coef,
            kl_coef=kl_coef,
            kl_estimator=estimator,
            kl_straight_through=straight_through,
        )
        given = extra if kl else {name: extra[name] for name in ("rollout_log_probs", "entropy")}
        loss, gradient, entropy_gradient, stats = run(policy_loss, columns, options, given)
        expected, expected_gradient, expected_entropy_gradient, _ = run(
            policy_loss_ref, columns, options, given
        )
        # Terms of at most exp(6) and 20, with weights of 1/200: their sum is rounded at 8 eps of about 5,
        # gradients at 8 eps of 2.
        assert abs(loss - expected) <= 8 * EPS * 5, options
        assert (
            (gradient - expected_gradient).abs() <= 8 * EPS * (expected_gradient.abs().max() + 0.01)
        ).all(), options
        assert ((entropy_gradient - expected_entropy_gradient).abs() <= EPS).all(), options
        assert (gradient[~exists] == 0).all() and (entropy_gradient[~exists] == 0).all()
        assert stats.entropy_sum.item() == pytest.approx(extra["entropy"][exists].sum().item(), rel=1e-5)
        tis = (columns[1] - extra["rollout_log_probs"]).exp().clamp(max=1.2)[exists].sum().item()
        assert (
            (stats.tis_weight_sum is None)
            if tis_clip is None
            else stats.tis_weight_sum.item() == pytest.approx(tis, rel=1e-5)
        )
        if kl:
            d = (columns[0] - extra["ref_log_probs"])[exists].double()
            value = {"k1": d, "abs": d.abs(), "k2": d * d / 2, "k3": (torch.expm1(-d) + d).clamp(max=10)}[
                estimator
            ]
            assert stats.ref_kl_sum.item() == pytest.approx(value.sum().item(), rel=1e-5, abs=1e-4)
        else:
            assert stats.ref_kl_sum is None


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_gradcheck(monkeypatch, options):
    """fp64 on the PyTorch path, no token near a kink: the nearest is 0.02 away, the step 1e-6."""
    monkeypatch.setenv("MEGARL_KERNELS", "torch")
    log_ratio = torch.tensor(
        [-2.0, -0.3, -0.2, -0.05, 0.0, 0.1, 0.21, 0.3, 0.9, 1.3, 2.0], dtype=torch.float64
    ).repeat(2)
    advantages = torch.tensor([1.5] * 11 + [-0.7] * 11, dtype=torch.float64)
    old_log_probs = torch.full_like(log_ratio, -2.5)
    weights = torch.linspace(0.5, 1, 22, dtype=torch.float64)
    entropy = torch.ones_like(log_ratio, requires_grad=True)
    ref = old_log_probs + 0.1
    for estimator in ("k2", "k3"):
        full = dataclasses.replace(
            options, kl_coef=0.3, kl_estimator=estimator, entropy_coef=0.1, tis_clip=1.5
        )
        log_probs = (old_log_probs + log_ratio).requires_grad_()
        arguments = (old_log_probs, advantages, weights, full)
        extra = dict(rollout_log_probs=old_log_probs - 0.1, ref_log_probs=ref)
        if (
            options.kind == "cispo"
        ):  # its loss is not what its gradient is the derivative of: the clipped ratio is a constant
            actual, expected = (
                run(f, (log_probs.detach(), *arguments[:3]), full, extra | dict(entropy=entropy.detach()))[
                    1:3
                ]
                for f in (policy_loss, policy_loss_ref)
            )
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
        else:
            assert torch.autograd.gradcheck(
                lambda x, h: policy_loss(x, *arguments, entropy=h, **extra)[0], (log_probs, entropy)
            )  # noqa: B023


def test_statistics_by_hand(kernels):
    """Ratios 1/2, 1, 3/2 and 4, each with advantage 1 and -1, clip to [0.8, 1.28], dual clip at 3."""
    ratios = torch.tensor([0.5, 1.0, 1.5, 4.0] * 2)
    advantages = torch.tensor([1.0] * 4 + [-1.0] * 4)
    old_log_probs = torch.full((8,), -2.0)
    columns = (old_log_probs + ratios.log(), old_log_probs, advantages, torch.ones(8))
    loss, gradient, _, stats = run(policy_loss, columns, DUAL)
    # A = 1: 0.5, 1, 1.28, 1.28 with a minus; A = -1: 0.8, 1, 1.5, 3.
    assert loss.item() == pytest.approx(-4.06 + 6.3, rel=1e-6)
    assert gradient.tolist() == pytest.approx([-0.5, -1, 0, 0, 0, 1, 1.5, 0], rel=1e-6)
    assert stats.num_clipped == 3 and stats.num_dual_clipped == 1
    assert stats.ratio_deviation_max.item() == pytest.approx(3, rel=1e-6)
    assert stats.kl_sum.item() == pytest.approx(
        2 * sum(r - 1 - math.log(r) for r in (0.5, 1, 1.5, 4)), rel=1e-6
    )
    assert policy_loss(*columns, DAPO)[1].num_dual_clipped == 0
    of_the_halves = policy_loss(*(x[::4] for x in columns), DAPO)[1]
    assert of_the_halves.ratio_deviation_max.item() == pytest.approx(0.5, rel=1e-6)


def test_cispo_by_hand(kernels):
    """The same tokens: the ratio is clipped to [0, 1.28] on both sides of 0, and every token keeps a
    gradient."""
    ratios, old_log_probs = torch.tensor([0.5, 1.0, 1.5, 4.0] * 2), torch.full((8,), -2.0)
    columns = (
        old_log_probs + ratios.log(),
        old_log_probs,
        torch.tensor([1.0] * 4 + [-1.0] * 4),
        torch.ones(8),
    )
    loss, gradient, _, stats = run(policy_loss, columns, CISPO)
    assert gradient.tolist() == pytest.approx([-0.5, -1, -1.28, -1.28, 0.5, 1, 1.28, 1.28], rel=1e-6)
    assert loss.item() == pytest.approx((gradient * columns[0]).sum().item(), abs=1e-5)
    assert stats.num_clipped == 4 and stats.num_dual_clipped == 0


@pytest.mark.parametrize("options", [*KINDS.values(), PolicyLossOptions(clip_eps_low=0.0, clip_eps_high=0.0)])
def test_on_policy_is_exactly_reinforce(kernels, options):
    """ratio 1: nothing clipped, nothing deviates, and the gradient is -A weight to the last bit."""
    (log_probs, _, advantages, weights), _ = make_tokens()
    loss, gradient, _, stats = run(policy_loss, (log_probs, log_probs.clone(), advantages, weights), options)
    assert torch.equal(gradient, -advantages * weights)
    per_token = -advantages * weights * (log_probs if options.kind == "cispo" else 1)
    assert abs(loss - per_token.sum()) <= 8 * EPS * per_token.abs().sum()
    assert stats.num_clipped == stats.num_dual_clipped == stats.kl_sum == stats.ratio_deviation_max == 0


def test_incoming_gradient_scales_and_statistics_carry_none(kernels):
    columns, extra = make_tokens(130)
    options = dataclasses.replace(DUAL, entropy_coef=0.1, kl_coef=0.1, tis_clip=1.5)
    log_probs, entropy = columns[0].clone().requires_grad_(), extra["entropy"].clone().requires_grad_()
    loss, stats = policy_loss(log_probs, *columns[1:], options, **extra | dict(entropy=entropy))
    (128 * loss).backward()
    _, gradient, entropy_gradient, _ = run(policy_loss, columns, options, extra)
    torch.testing.assert_close(log_probs.grad, 128 * gradient, rtol=0, atol=0)
    torch.testing.assert_close(entropy.grad, 128 * entropy_gradient, rtol=EPS, atol=0)
    assert not any(value.requires_grad for value in stats)


def test_repeatable_to_the_bit_and_a_token_does_not_depend_on_the_others(kernels):
    columns, extra = make_tokens(300)
    options = dataclasses.replace(DUAL, entropy_coef=0.1, kl_coef=0.1, tis_clip=1.5)
    loss, gradient, _, stats = run(policy_loss, columns, options, extra)
    again = run(policy_loss, columns, options, extra)
    assert torch.equal(again[0], loss) and torch.equal(again[1], gradient) and again[3] == stats
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    permuted = run(
        policy_loss, [x[order] for x in columns], options, {name: x[order] for name, x in extra.items()}
    )
    assert torch.equal(permuted[1], gradient[order])
    for ours, theirs in zip((permuted[0], *permuted[3]), (loss, *stats)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_non_contiguous_and_bf16_inputs(kernels):
    columns, extra = make_tokens(130)
    options = dataclasses.replace(DUAL, entropy_coef=0.1, kl_coef=0.1, tis_clip=1.5)
    wide = lambda x: torch.stack([x, x.flip(0)], 1)[:, 0]  # noqa: E731
    expected = run(policy_loss, columns, options, extra)
    actual = run(
        policy_loss, [wide(x) for x in columns], options, {name: wide(x) for name, x in extra.items()}
    )
    assert (
        torch.equal(actual[0], expected[0])
        and torch.equal(actual[1], expected[1])
        and actual[3] == expected[3]
    )
    half = lambda x: x.bfloat16()  # noqa: E731
    result = policy_loss(*(half(x) for x in columns), options, **{name: half(x) for name, x in extra.items()})
    rounded = policy_loss(
        *(half(x).float() for x in columns), options, **{name: half(x).float() for name, x in extra.items()}
    )
    assert result[0].dtype == torch.float32 and torch.equal(result[0], rounded[0]) and result[1] == rounded[1]


@pytest.mark.parametrize("gap", [100.0, 1e4, math.inf])
def test_runaway_ratios_stay_finite_without_gradient(kernels, gap):
    log_probs, old_log_probs = torch.tensor([-0.1, -0.1 - gap]), torch.tensor([-0.1 - gap, -0.1])
    options = PolicyLossOptions(clip_eps_low=1.0, clip_eps_high=9.9)
    loss, gradient, _, stats = run(
        policy_loss, (log_probs, old_log_probs, -torch.ones(2), torch.ones(2)), options
    )
    assert loss.item() == pytest.approx(math.exp(20) + math.exp(-20), rel=1e-5) and gradient.tolist() == [
        0,
        0,
    ]
    assert stats.ratio_deviation_max.item() == pytest.approx(math.exp(20), rel=1e-5)
    if gap == math.inf:
        return  # old and now both impossible: no ratio
    weighted = dataclasses.replace(options, tis_clip=2.0)
    columns, rollout = (
        (log_probs, log_probs, torch.ones(2), torch.ones(2)),
        dict(rollout_log_probs=old_log_probs),
    )
    loss, _, _, stats = run(policy_loss, columns, weighted, rollout)
    assert stats.tis_weight_sum.item() == pytest.approx(2, rel=1e-5) and loss.item() == pytest.approx(
        -2, rel=1e-5
    )


def test_kl_is_limited_without_gradient_unless_straight_through(kernels):
    """d = -100, -5, -1, 5 and 100: k3 is held at 10 where exp(-d) - 1 + d is more."""
    d = torch.tensor([-100.0, -5.0, -1.0, 5.0, 100.0])
    zero = torch.zeros(5)
    options = dataclasses.replace(PPO, kl_coef=1.0)
    for straight_through in (False, True):
        chosen = dataclasses.replace(options, kl_straight_through=straight_through)
        loss, gradient, _, _ = run(policy_loss, (d, d, zero, torch.ones(5)), chosen, dict(ref_log_probs=zero))
        assert loss.item() == pytest.approx(10 + 10 + math.e - 2 + math.exp(-5) + 4 + 10, rel=1e-6)
        natural = [0, 0, 1 - math.e, 1 - math.exp(-5), 0]
        assert gradient.tolist() == pytest.approx(d.tolist() if straight_through else natural, rel=1e-6)


@pytest.mark.parametrize("kind", ["dual", "cispo"])
@pytest.mark.parametrize("column", [0, 1, 2, *EXTRA])
def test_nan_is_not_hidden_and_does_not_spread(kernels, kind, column):
    columns, extra = make_tokens(130)
    options = dataclasses.replace(KINDS[kind], entropy_coef=0.1, kl_coef=0.1, tis_clip=1.5)
    clean = run(policy_loss, columns, options, extra)[1]
    (columns[column] if isinstance(column, int) else extra[column])[70] = NAN
    loss, gradient, _, stats = run(policy_loss, columns, options, extra)
    assert loss.isnan() and (gradient[70].isnan() or column == "entropy")
    others = torch.arange(130) != 70
    assert torch.equal(gradient[others], clean[others])
    if column in (0, 1):
        assert stats.ratio_deviation_max.isnan() and stats.kl_sum.isnan()


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_exist_is_not_read(kernels, kind):
    columns, extra = make_tokens(200)
    options = dataclasses.replace(KINDS[kind], entropy_coef=0.1, kl_coef=0.1, tis_clip=1.5)
    clean = run(policy_loss, columns, options, extra)
    for garbage in (NAN, math.inf, -math.inf):
        for column in (*columns[:3], *extra.values()):
            column[columns[3] == 0] = garbage
        result = run(policy_loss, columns, options, extra)
        assert (
            torch.equal(result[0], clean[0])
            and torch.equal(result[1], clean[1])
            and torch.equal(result[2], clean[2])
        )
        assert result[3] == clean[3]


def test_no_tokens(kernels):
    columns, extra = make_tokens(0)
    options = dataclasses.replace(DUAL, entropy_coef=0.1, kl_coef=0.1, tis_clip=1.5)
    loss, gradient, entropy_gradient, stats = run(policy_loss, columns, options, extra)
    assert (
        loss == 0 and gradient.shape == entropy_gradient.shape == (0,) and all(value == 0 for value in stats)
    )
    nothing = (*make_tokens(40)[0][:3], torch.zeros(40))
    loss, gradient, _, stats = run(policy_loss, nothing, DUAL)
    assert loss == 0 and not gradient.any() and all(value == 0 for value in stats if value is not None)


def test_only_the_gradient_is_kept(kernels):
    kept = []
    (log_probs, *constants), _ = make_tokens(200)
    log_probs.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()), lambda x: x):
        policy_loss(log_probs, *constants, DUAL)
    assert kept == [200]


@pytest.mark.parametrize(
    "name", ["old_log_probs", "advantages", "weights", "rollout_log_probs", "ref_log_probs"]
)
def test_errors_name_the_tensor(name):
    columns, extra = make_tokens(6)
    arguments = (
        dict(zip(("log_probs", "old_log_probs", "advantages", "weights"), columns))
        | extra
        | dict(options=PPO)
    )
    with pytest.raises(ValueError, match=rf"{name} requires a gradient"):
        policy_loss(**arguments | {name: arguments[name].clone().requires_grad_()})
    with pytest.raises(
        ValueError, match=rf"{name} must be \[N\] like log_probs, got \[5\] with log_probs \[6\]"
    ):
        policy_loss(**arguments | {name: torch.zeros(5)})


@pytest.mark.parametrize(
    "change, name",
    [
        (dict(tis_clip=2.0), "rollout_log_probs"),
        (dict(kl_coef=0.1), "ref_log_probs"),
        (dict(entropy_coef=0.1), "entropy"),
    ],
)
def test_a_missing_column_is_named(change, name):
    with pytest.raises(
        ValueError,
        match=rf"{name} is None, but {next(iter(change))} \({next(iter(change.values()))}\) needs it",
    ):
        policy_loss(*make_tokens(6)[0], dataclasses.replace(PPO, **change))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(kind="gspo"), r"kind \('gspo'\) must be one of ppo, cispo"),
        (dict(kl_estimator="k4"), r"kl_estimator \('k4'\) must be one of k1, abs, k2, k3"),
        (dict(kind="cispo", clip_ratio_c=3.0), r"clip_ratio_c \(3.0\) must be None with kind 'cispo'"),
    ],
)
def test_contradicting_options_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PPO, **change)
