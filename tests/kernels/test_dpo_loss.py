"""`dpo_loss` by every backend: loss and gradient against autograd of the fp64 specification, one pair after
another.

Bound: every token's difference of log-probs is rounded once, half a unit in the last place of up to 8; sums
of them are fp64. The margin is so within eps times the sum of absolute log-probs, and the loss within its
slope, at most 1 (ipo: 2 |h|), of that."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.kernels.dpo_loss import dpo_loss, dpo_loss_ref

EPS = torch.finfo(torch.float32).eps
NAN = math.nan
LENGTHS = [1, 5, 0, 64, 32, 33, 150, 20, 0, 0]
LOSSES = {
    "sigmoid": dict(beta=0.1),
    "smoothed": dict(beta=0.5, label_smoothing=0.1),
    "ipo": dict(beta=0.2, kind="ipo"),
}


@pytest.fixture
def kernels(kernels, monkeypatch):
    """Blocks so small that there are several, and last ones that are not full."""
    if kernels != "torch":
        from megarl.kernels import dpo_loss_triton, partial_sums_triton

        monkeypatch.setattr(dpo_loss_triton, "_BLOCK", 32)
        monkeypatch.setattr(partial_sums_triton, "_BLOCK", 4)
    return kernels


def make_pairs(lengths=LENGTHS, dtype=torch.float32, seed=0):
    """(log_probs, ref_log_probs, mask, cu_seqlens, weights); what is masked holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = torch.tensor(
        [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32
    )
    num_tokens = int(cu_seqlens[-1])
    ref = -3 * torch.rand(num_tokens, generator=generator, dtype=dtype)
    log_probs = ref + 0.5 * torch.randn(num_tokens, generator=generator, dtype=dtype)
    mask = torch.rand(num_tokens, generator=generator) > 0.3
    log_probs[~mask], ref[~mask] = NAN, NAN
    return (
        log_probs,
        ref,
        mask,
        cu_seqlens,
        torch.rand(len(lengths) // 2, generator=generator, dtype=dtype) + 0.1,
    )


def run(columns, function=dpo_loss, **options):
    log_probs = columns[0].clone().requires_grad_()
    result = function(log_probs, *columns[1:], **options)
    loss, stats = result if isinstance(result, tuple) else (result, None)
    return (
        loss.detach(),
        torch.autograd.grad(loss, log_probs, materialize_grads=True)[0] if loss.requires_grad else None,
        stats,
    )


@pytest.mark.parametrize("lengths", [LENGTHS, [3, 4], [0, 0], []], ids=str)
@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_against_fp64(kernels, options, lengths):
    columns = make_pairs(lengths)
    (loss, gradient, stats), (expected, expected_gradient, _) = (
        run(columns, **options),
        run(columns, dpo_loss_ref, **options),
    )
    log_probs, ref, mask, cu_seqlens, weights = columns
    sums = [
        (log_probs[a:b].double() - ref[a:b].double())[mask[a:b]].sum()
        for a, b in zip(cu_seqlens, cu_seqlens[1:])
    ]
    size = (log_probs.abs() + ref.abs())[mask].sum() + 1
    steepness = 2 * max([abs(c - r) + 3 for c, r in zip(sums[::2], sums[1::2])], default=1)
    assert loss.dtype == torch.float32 and abs(loss - expected) <= 4 * EPS * size * steepness
    if expected_gradient is not None:
        assert ((gradient - expected_gradient).abs() <= 4 * EPS * size * steepness).all() and (
            gradient[~mask] == 0
        ).all()
    assert stats.num_correct == sum(c > r for c, r in zip(sums[::2], sums[1::2]))
    assert stats.chosen_reward_sum.item() == pytest.approx(
        options["beta"] * float(sum(sums[::2])), rel=1e-5, abs=1e-6
    )
    assert stats.rejected_reward_sum.item() == pytest.approx(
        options["beta"] * float(sum(sums[1::2])), rel=1e-5, abs=1e-6
    )


@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_gradcheck(monkeypatch, options):
    monkeypatch.setenv("MEGARL_KERNELS", "torch")
    columns = make_pairs([2, 3, 1, 2], dtype=torch.float64)
    columns[0][~columns[2]] = 0
    assert torch.autograd.gradcheck(
        lambda x: dpo_loss(x, *columns[1:], **options)[0], (columns[0].requires_grad_(),)
    )


def test_by_hand(kernels):
    """Chosen +1 and +1, rejected -1: h = 3."""
    columns = (
        torch.tensor([-1.0, -1.0, -2.0]),
        torch.tensor([-2.0, -2.0, -1.0]),
        torch.ones(3, dtype=torch.bool),
        torch.tensor([0, 2, 3]),
        torch.tensor([2.0]),
    )
    loss, gradient, stats = run(columns, beta=0.5)
    wrong = 1 / (1 + math.exp(1.5))
    assert loss.item() == pytest.approx(-2 * math.log(1 - wrong), rel=1e-6)
    assert gradient.tolist() == pytest.approx([-wrong, -wrong, wrong], rel=1e-6)
    assert stats == (1.0, 1.0, -0.5)
    loss, gradient, _ = run(columns, beta=0.25, kind="ipo")
    assert loss == 2.0 * (3 - 2) ** 2 and gradient.tolist() == [4, 4, -4]


def test_the_starting_policy_has_loss_log_2(kernels):
    log_probs, _, mask, cu_seqlens, weights = make_pairs()
    loss, gradient, stats = run((log_probs, log_probs.clone(), mask, cu_seqlens, weights), beta=0.1)
    assert loss.item() == pytest.approx(math.log(2) * weights.sum().item(), rel=1e-6) and stats == (
        0.0,
        0.0,
        0.0,
    )
    chosen = torch.repeat_interleave(torch.tensor([-1.0, 1.0] * 5), cu_seqlens.diff())
    expected = torch.where(
        mask, chosen * 0.05 * weights.repeat_interleave(2).repeat_interleave(cu_seqlens.diff()), 0
    )
    torch.testing.assert_close(gradient, expected, rtol=2 * EPS, atol=0)


@pytest.mark.parametrize("margin", [100.0, -100.0, 1e5, -1e5])
def test_extreme_margins_stay_finite_and_exact(kernels, margin):
    """-log sigmoid(100) is 3.7e-44 and its slope too, not 0 / 0; at -100 the loss is 100 and the slope -1."""
    columns = (
        torch.tensor([margin, 0.0]),
        torch.zeros(2),
        torch.ones(2, dtype=torch.bool),
        torch.tensor([0, 1, 2]),
        torch.ones(1),
    )
    loss, gradient, _ = run(columns, beta=1.0)
    wrong = float(margin < 0)
    assert loss.item() == pytest.approx(max(-margin, 0), abs=1e-40) and gradient.tolist() == pytest.approx(
        [-wrong, wrong], abs=1e-40
    )
    small = run((columns[0] / abs(margin) * 15, *columns[1:]), beta=1.0)[0].item()
    assert small == pytest.approx(math.log1p(math.exp(-15)) + 15 * (margin < 0), rel=4 * EPS)


def test_repeatable_and_pairs_do_not_depend_on_each_other(kernels):
    columns = make_pairs()
    loss, gradient, stats = run(columns, beta=0.1)
    again = run(columns, beta=0.1)
    assert torch.equal(again[0], loss) and torch.equal(again[1], gradient) and again[2] == stats
    order = [3, 1, 4, 0, 2]
    pairs = lambda x: x.split([a + b for a, b in zip(LENGTHS[::2], LENGTHS[1::2])])  # noqa: E731
    lengths = [length for i in order for length in LENGTHS[2 * i : 2 * i + 2]]
    permuted = [torch.cat([pairs(x)[i] for i in order]) for x in columns[:3]]
    result = run((*permuted, torch.tensor([0, *lengths]).cumsum(0), columns[4][order]), beta=0.1)
    assert torch.equal(result[1], torch.cat([pairs(gradient)[i] for i in order]))
    torch.testing.assert_close(result[0], loss, rtol=1e-6, atol=0)
    wide = run([torch.stack([x, x.flip(0)], 1)[:, 0] for x in columns], beta=0.1)
    assert torch.equal(wide[0], loss) and torch.equal(wide[1], gradient)


def test_margin_of_long_sequences(kernels):
    """Sums near 3000 that differ by 0.5: in fp32 their difference alone would be off by 2e-4, and the sums by
    much more."""
    generator = torch.Generator().manual_seed(0)
    ref = -3 * torch.rand(6000, generator=generator)
    log_probs = ref + 1 + 0.1 * torch.randn(6000, generator=generator)
    sums = (log_probs.double() - ref.double()).view(2, 3000).sum(1)
    log_probs[0] -= (sums[0] - sums[1] - 0.5).float()
    columns = (
        log_probs,
        ref,
        torch.ones(6000, dtype=torch.bool),
        torch.tensor([0, 3000, 6000]),
        torch.ones(1),
    )
    (loss, gradient, _), (expected, expected_gradient, _) = (
        run(columns, beta=1.0),
        run(columns, dpo_loss_ref, beta=1.0),
    )
    # Differences of log-probs are rounded by up to half a unit of 2: 6e-8, and 6000 such roundings do not all
    # point one way.
    assert abs(loss - expected) <= 2e-5 and (gradient - expected_gradient).abs().max() <= 2e-5


@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_nan_reaches_its_pair_only(kernels, options):
    columns = make_pairs()
    clean = run(columns, **options)
    columns[0][80:100][columns[2][80:100]] = (
        NAN  # in sequence 4, which is with 5 the pair of tokens 70 to 134
    )
    loss, gradient, stats = run(columns, **options)
    spoilt = (torch.arange(len(gradient)) >= 70) & (torch.arange(len(gradient)) < 135)
    assert loss.isnan() and gradient[spoilt & columns[2]].isnan().all() and stats.chosen_reward_sum.isnan()
    assert torch.equal(gradient[~spoilt], clean[1][~spoilt])


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(mask=torch.ones(3)), r"mask must be bool \[3\] like log_probs, got torch.float32"),
        (
            dict(ref_log_probs=torch.zeros(2)),
            r"log_probs and ref_log_probs must be \[T\], got \[3\] and \[2\]",
        ),
        (
            dict(cu_seqlens=torch.tensor([0, 3])),
            r"cu_seqlens must be \[2 P \+ 1\] and weights \[P\].*got \[2\] and \[1\]",
        ),
        (
            dict(cu_seqlens=torch.tensor([0, 1, 2])),
            r"cu_seqlens must go up from 0 to the number of tokens \(3\)",
        ),
        (dict(weights=torch.ones(1, requires_grad=True)), r"weights requires a gradient"),
        (dict(beta=0.0), r"beta \(0.0\) must be above 0, e.g. 0.1"),
        (dict(label_smoothing=0.5), r"label_smoothing \(0.5\) must be in \[0, 0.5\)"),
        (dict(kind="ipo", label_smoothing=0.1), r"label_smoothing \(0.1\).*0 with kind 'ipo'"),
        (dict(kind="kto"), r"kind \('kto'\) must be one of sigmoid, ipo"),
    ],
)
def test_errors_name_the_value(change, message):
    arguments = dict(
        log_probs=torch.zeros(3),
        ref_log_probs=torch.zeros(3),
        mask=torch.ones(3, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 1, 3]),
        weights=torch.ones(1),
        beta=0.1,
    )
    with pytest.raises(ValueError, match=message):
        dpo_loss(**arguments | change)
