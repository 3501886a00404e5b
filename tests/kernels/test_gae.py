"""`gae` and `whiten` against one token after another in fp64, by every backend.

Bound of an advantage: a sum of at most 1 / (1 - gamma gae_lambda) steps' worth of terms, each rounded a few
times: 32 eps times the sum of the absolute terms, which the loop gives when it is run on absolute values."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.kernels.gae import gae, gae_ref, whiten, whiten_ref

EPS = torch.finfo(torch.float32).eps
NAN = math.nan
LENGTHS = {
    "one": [1],
    "none": [0],
    "no sequences": [],
    "many": [1, 0, 7, 31, 32, 33, 64, 65, 0, 150, 2],
}


@pytest.fixture
def kernels(kernels, monkeypatch):
    """Blocks so small that there are several, and last ones that are not full."""
    if kernels != "torch":
        from megarl.kernels import gae_triton

        monkeypatch.setattr(gae_triton, "_BLOCK", 32)
    return kernels


def make_batch(lengths, share_masked=0.3, seed=0):
    """(rewards, values, mask, cu_seqlens, bootstrap_values); what is masked holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = torch.tensor(
        [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32
    )
    num_tokens = int(cu_seqlens[-1])
    mask = torch.rand(num_tokens, generator=generator) >= share_masked
    rewards, values = (torch.randn(num_tokens, generator=generator) for _ in range(2))
    rewards[~mask], values[~mask] = NAN, NAN
    return rewards, values, mask, cu_seqlens, torch.randn(len(lengths), generator=generator)


def run(function, batch, gamma=0.99, gae_lambda=0.95, bootstrap=True):
    *columns, bootstrap_values = batch
    return function(
        *columns, gamma=gamma, gae_lambda=gae_lambda, bootstrap_values=bootstrap_values if bootstrap else None
    )


def with_discounts(share_masked):
    """Every discount with some tokens masked; with none or all of them the others are left to the night."""
    for discounts in [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5)]:
        extra = share_masked != 0.3 and discounts != (0.99, 0.95)
        yield pytest.param(share_masked, *discounts, marks=[pytest.mark.nightly] * extra)


@pytest.mark.nightly_but_one_in(2)
@pytest.mark.parametrize(
    "share_masked, gamma, gae_lambda", [case for share in (0.0, 0.3, 1.0) for case in with_discounts(share)]
)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_against_the_loop(kernels, lengths, share_masked, gamma, gae_lambda):
    batch = make_batch(lengths, share_masked)
    for bootstrap in (True, False):
        actual, expected = (
            run(gae, batch, gamma, gae_lambda, bootstrap),
            run(gae_ref, batch, gamma, gae_lambda, bootstrap),
        )
        rewards, values, mask, cu_seqlens, bootstrap_values = batch
        absolute = (rewards.abs(), -values.abs(), mask, cu_seqlens, bootstrap_values.abs())
        size = (
            run(gae_ref, absolute, gamma, gae_lambda, bootstrap).advantages.abs()
            + 2 * values.abs().nan_to_num()
            + 1
        )
        for ours, theirs in zip(actual[:2], expected[:2]):
            assert ours.dtype == torch.float32 and ours.shape == theirs.shape
            assert ((ours - theirs).abs() <= 32 * EPS * size).all()
            assert (ours[~mask] == 0).all()
        exact = actual.advantages.double()
        stats = torch.stack([exact.sum(), exact.square().sum(), mask.sum().double()])
        torch.testing.assert_close(actual.stats, stats, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gamma", [0.99, 1.0])
def test_each_sequence_may_have_a_decay_of_its_own(kernels, gamma):
    """Equal ones are as one number; different ones give each sequence what it gets alone, and the loop's numbers to
    rounding."""
    lengths = [150, 1, 40, 0, 70]
    batch = make_batch(lengths, 0.3)
    for ours, theirs in zip(run(gae, batch, gamma, torch.full((5,), 0.5)), run(gae, batch, gamma, 0.5)):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    decays = torch.tensor([0.95, 0.5, 0.0, 0.7, 1.0])
    actual, expected = run(gae, batch, gamma, decays), run(gae_ref, batch, gamma, decays)
    # sums of at most 150 terms of size 1
    torch.testing.assert_close(actual.advantages.double(), expected.advantages, atol=150 * EPS * 4, rtol=0)
    torch.testing.assert_close(actual.returns.double(), expected.returns, atol=150 * EPS * 4, rtol=0)
    for i, length in enumerate(lengths):
        alone = (
            *(column.split(lengths)[i] for column in batch[:3]),
            torch.tensor([0, length]),
            batch[4][i : i + 1],
        )
        found = run(gae, alone, gamma, decays[i : i + 1]).advantages
        torch.testing.assert_close(found, actual.advantages.split(lengths)[i], atol=1e-5, rtol=0)
    wrongs = [torch.tensor([0.5]), torch.ones(5, dtype=torch.int64), torch.full((5,), 1.5)]
    if kernels == "triton":
        del wrongs[2]  # to look at a GPU's numbers would stop its stream
    for wrong in wrongs:
        with pytest.raises(ValueError, match="gae_lambda"):
            run(gae, batch, gamma, wrong)


def test_full_lambda_and_gamma_is_return_minus_value(kernels):
    """gamma = gae_lambda = 1: the rewards of this action and all later ones, plus the bootstrap, minus the
    value."""
    rewards, values, mask, cu_seqlens, bootstrap_values = batch = make_batch([150, 20])
    actual = run(gae, batch, 1.0, 1.0)
    for sequence, (begin, end) in enumerate(((0, 150), (150, 170))):
        earned = (
            torch.where(mask, rewards, 0).double()[begin:end].flip(0).cumsum(0).flip(0)
            + bootstrap_values[sequence]
        )
        is_action = mask[begin:end]
        # Up to 150 terms of size 1, added in any order.
        torch.testing.assert_close(
            actual.returns[begin:end][is_action].double(), earned[is_action], atol=150 * EPS * 4, rtol=0
        )
        plain = (earned - values[begin:end])[is_action]
        torch.testing.assert_close(
            actual.advantages[begin:end][is_action].double(), plain, atol=150 * EPS * 4, rtol=0
        )


def test_masked_tokens_take_no_step(kernels):
    """The same actions with tool output between them: the same advantages. Not bit by bit: they stand at
    other places of the scan."""
    rewards, values, mask, cu_seqlens, bootstrap_values = batch = make_batch([60, 40])
    dense = (
        rewards[mask],
        values[mask],
        torch.ones(int(mask.sum()), dtype=torch.bool),
        torch.tensor([0, int(mask[:60].sum()), int(mask.sum())]),
        bootstrap_values,
    )
    torch.testing.assert_close(
        run(gae, batch).advantages[mask], run(gae, dense).advantages, atol=1e-5, rtol=0
    )


def test_packing_and_order_of_sequences_change_no_bit(kernels):
    lengths = LENGTHS["many"]
    batch = make_batch(lengths)
    whole = run(gae, batch)
    assert all(torch.equal(a, b) for a, b in zip(whole, run(gae, batch)))
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(1)).tolist()
    permuted = [torch.cat([column.split(lengths)[i] for i in order]) for column in batch[:3]]
    cu_seqlens = torch.tensor([0, *torch.tensor([lengths[i] for i in order]).cumsum(0).tolist()])
    result = run(gae, (*permuted, cu_seqlens, batch[4][order]))
    for ours, theirs in zip(result[:2], whole[:2]):
        assert torch.equal(ours, torch.cat([theirs.split(lengths)[i] for i in order]))
    torch.testing.assert_close(result.stats, whole.stats, rtol=1e-12, atol=0)
    for i, length in enumerate(lengths):
        alone = run(
            gae,
            (
                *(column.split(lengths)[i] for column in batch[:3]),
                torch.tensor([0, length]),
                batch[4][i : i + 1],
            ),
        )
        for ours, theirs in zip(alone[:2], whole[:2]):
            assert torch.equal(ours, theirs.split(lengths)[i])


def test_shares_of_ranks_add_up(kernels):
    lengths = [40, 3, 70, 12]
    batch, whole = make_batch(lengths), run(gae, make_batch(lengths))
    first = run(gae, (*(column[:43] for column in batch[:3]), batch[3][:3], batch[4][:2]))
    second = run(gae, (*(column[43:] for column in batch[:3]), batch[3][2:] - 43, batch[4][2:]))
    torch.testing.assert_close(first.stats + second.stats, whole.stats, rtol=1e-12, atol=0)
    shares = [
        whiten(part.advantages, mask, first.stats + second.stats)
        for part, mask in ((first, batch[2][:43]), (second, batch[2][43:]))
    ]
    assert torch.equal(torch.cat(shares), whiten(whole.advantages, batch[2], first.stats + second.stats))


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_whitened_advantages(kernels, offset):
    """An offset of 1000 costs ten bits of the fp32 advantages themselves, not more: sums are fp64."""
    mask = make_batch([150, 40, 33])[2]
    advantages = torch.where(
        mask, torch.randn(len(mask), generator=torch.Generator().manual_seed(3)) + offset, NAN
    )
    exact = advantages[mask].double()
    stats = torch.stack([exact.sum(), exact.square().sum(), mask.sum().double()])
    whitened = whiten(advantages, mask, stats)
    assert (whitened[~mask] == 0).all()
    expected = (exact - exact.mean()) / exact.std()
    torch.testing.assert_close(whitened[mask].double(), expected, atol=1e-6 + offset * EPS, rtol=0)
    torch.testing.assert_close(
        whitened.double(), whiten_ref(advantages, mask, stats), atol=1e-6 + offset * EPS, rtol=0
    )


@pytest.mark.parametrize("values", [[], [3.0], [0.7] * 40])
def test_whitening_nothing_or_equal_advantages_gives_zero(kernels, values):
    advantages = torch.tensor(values)
    stats = torch.stack(
        [
            advantages.double().sum(),
            advantages.double().square().sum(),
            torch.tensor(float(len(values))).double(),
        ]
    )
    assert torch.equal(
        whiten(advantages, torch.ones(len(values), dtype=torch.bool), stats), torch.zeros(len(values))
    )


def test_nan_of_an_action_reaches_what_depends_on_it_and_nothing_else(kernels):
    rewards, values, _, cu_seqlens, bootstrap_values = make_batch([100, 70, 20], share_masked=0.0)
    clean = run(gae, (rewards, values, torch.ones(190, dtype=torch.bool), cu_seqlens, bootstrap_values))
    rewards[150] = NAN
    result = run(gae, (rewards, values, torch.ones(190, dtype=torch.bool), cu_seqlens, bootstrap_values))
    assert result.advantages[100:151].isnan().all() and result.stats[:2].isnan().all()
    for part in (slice(0, 100), slice(151, 190)):
        assert torch.equal(result.advantages[part], clean.advantages[part])


def test_non_contiguous_and_bf16_inputs(kernels):
    batch = make_batch([50, 20])
    wide = [torch.stack([column, column.flip(0)], 1)[:, 0] for column in batch]
    assert not wide[0].is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(run(gae, wide), run(gae, batch)))
    half = (batch[0].bfloat16(), batch[1].bfloat16(), *batch[2:])
    rounded = (half[0].float(), half[1].float(), *batch[2:])
    assert all(torch.equal(a, b) for a, b in zip(run(gae, half), run(gae, rounded)))


def test_large_values_stay_finite(kernels):
    rewards, values, mask, cu_seqlens, bootstrap_values = make_batch([90])
    result = run(gae, (rewards * 1e30, values * 1e30, mask, cu_seqlens, bootstrap_values * 1e30))
    expected = run(gae_ref, (rewards * 1e30, values * 1e30, mask, cu_seqlens, bootstrap_values * 1e30))
    torch.testing.assert_close(result.advantages.double(), expected.advantages, rtol=1e-4, atol=1e25)
    assert result.stats.isfinite().all()  # fp64: squares of 1e30 fit


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(values=torch.zeros(4)),
            r"values must be a float tensor \[5\] like rewards, got torch.float32 \[4\]",
        ),
        (dict(mask=torch.ones(5)), r"mask must be bool \[5\] like rewards, got torch.float32"),
        (
            dict(rewards=torch.zeros(5, dtype=torch.int64)),
            r"rewards must be a float tensor \[T\], got torch.int64",
        ),
        (
            dict(cu_seqlens=torch.tensor([0, 3])),
            r"cu_seqlens must go up from 0 to the number of tokens \(5\), got \[0, 3\] ending at 3",
        ),
        (dict(cu_seqlens=torch.tensor([0, 4, 3, 5])), r"cu_seqlens must go up"),
        (
            dict(cu_seqlens=torch.tensor([1.0])),
            r"cu_seqlens must be int32 or int64 \[B \+ 1\], got torch.float32",
        ),
        (
            dict(bootstrap_values=torch.zeros(1)),
            r"bootstrap_values must be \[2\], one per sequence, got \[1\]",
        ),
        (dict(gamma=1.5), r"gamma \(1.5\) must be in \[0, 1\]"),
        (dict(gae_lambda=NAN), r"gae_lambda \(nan\) must be in \[0, 1\]"),
        (dict(gae_lambda=torch.tensor([0.5, -0.5])), r"gae_lambda \(-0.5\) must be in \[0, 1\]"),
        (dict(gae_lambda=torch.tensor([0.5, 1.5])), r"largest gae_lambda \(1.5\) must be in \[0, 1\]"),
    ],
)
def test_errors_name_the_value(change, message):
    arguments = dict(
        rewards=torch.zeros(5),
        values=torch.zeros(5),
        mask=torch.ones(5, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 2, 5]),
        gamma=1.0,
        gae_lambda=1.0,
    )
    with pytest.raises(ValueError, match=message):
        gae(**(arguments | change))
