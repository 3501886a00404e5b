"""`group_advantages` by every backend against its specification (one group after another, fp64).

Bound: both work in fp64 and round once to fp32, so half a unit in the last place of the largest advantage,
doubled.
"""

import math

import pytest
import torch

from megarl.kernels.group_advantages import group_advantages, group_advantages_ref

NAN = math.nan


@pytest.fixture
def kernels(kernels, monkeypatch):
    """Blocks so small that there are several, and last ones that are not full."""
    if kernels != "torch":
        from megarl.kernels import group_advantages_triton

        monkeypatch.setattr(group_advantages_triton, "_BLOCK_OTHERS", 64)
    return kernels


def make_groups(num_groups=50, seed=0):
    """Groups of 1 to 9 samples in shuffled order, with failed samples, whole failed groups and groups without
    a difference."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 10, (num_groups,), generator=generator)
    ids = torch.repeat_interleave(torch.arange(num_groups) * 2**35 - 100, sizes)  # large: visits
    rewards = torch.randn(len(ids), generator=generator)
    rewards[torch.rand(len(ids), generator=generator) < 0.2] = NAN
    rewards[ids == ids[0]] = NAN
    rewards[ids == ids[-1]] = 0.1
    order = torch.randperm(len(ids), generator=generator)
    return rewards[order], ids[order]


@pytest.mark.parametrize("normalize_by_std", [False, True])
@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (3, 4))]
)
def test_against_the_specification(kernels, seed, normalize_by_std):
    rewards, ids = make_groups(seed=seed)
    actual, expected = (
        group_advantages(rewards, ids, normalize_by_std),
        group_advantages_ref(rewards, ids, normalize_by_std),
    )
    assert actual.dtype == torch.float32 and not actual.isnan().any()
    assert (actual.double() - expected).abs().max() <= torch.finfo(torch.float32).eps * expected.abs().max()


def test_by_hand(kernels):
    """Group 7: 1, 0, 0, 1 -> mean 1/2, unbiased std sqrt(1/3). Group 3: 2 and 4, the third failed. Group 5:
    alone."""
    rewards = torch.tensor([1.0, 2, 0, 0, NAN, 4, 1, 9])
    ids = torch.tensor([7, 3, 7, 7, 3, 3, 7, 5])
    assert group_advantages(rewards, ids, False).tolist() == [0.5, -1, -0.5, -0.5, 0, 1, 0.5, 0]
    a, b = 0.5 / (math.sqrt(1 / 3) + 1e-4), 1 / (math.sqrt(2) + 1e-4)
    expected = torch.tensor([a, -b, -a, -a, 0, b, a, 0])
    torch.testing.assert_close(group_advantages(rewards, ids, True), expected, atol=1e-7, rtol=0)
    assert group_advantages(rewards, ids, True, eps=1.0)[0].item() == pytest.approx(
        0.5 / (math.sqrt(1 / 3) + 1), rel=1e-6
    )


@pytest.mark.parametrize("normalize_by_std", [False, True])
@pytest.mark.parametrize("reward", [0.1, 1e7 + 1, -1e-30])
def test_equal_rewards_give_exactly_zero(kernels, reward, normalize_by_std):
    """A rounding error here would be blown up by 1 / eps and train on noise."""
    ids = torch.tensor([1] * 7 + [2] * 3)
    assert (group_advantages(torch.full((10,), reward), ids, normalize_by_std) == 0).all()


def test_a_common_offset_changes_nothing(kernels):
    ids = torch.arange(64) // 8
    rewards = torch.randint(0, 2, (64,), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(group_advantages(rewards + 2.0**20, ids, True), group_advantages(rewards, ids, True))


def test_order_of_samples_and_repetition(kernels):
    """Bit by bit when repeated; in another order an fp64 sum may round otherwise, and then the fp32 result by
    one unit."""
    rewards, ids = make_groups(num_groups=30)
    expected = group_advantages(rewards, ids, True)
    assert torch.equal(group_advantages(rewards, ids, True), expected)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        group_advantages(rewards[order], ids[order], True), expected[order], rtol=1.2e-7, atol=0
    )
    wide = torch.stack([rewards, rewards.flip(0)], 1)[:, 0], torch.stack([ids, ids.flip(0)], 1)[:, 0]
    assert torch.equal(group_advantages(*wide, True), expected)


def test_ids_of_any_size(kernels):
    """No id is used as an index or shortened."""
    ids = torch.tensor([2**62, -(2**62), 2**62, 2**62 + 2**32, -(2**62), 2**62 + 2**32])
    assert group_advantages(torch.tensor([1.0, 2, 3, 4, 5, 8]), ids, False).tolist() == [
        -1,
        -1.5,
        1,
        -2,
        1.5,
        2,
    ]


def test_empty(kernels):
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), True).shape == (0,)


@pytest.mark.parametrize(
    "rewards, ids, message",
    [
        ([1.0, math.inf], [0, 0], r"rewards\[1\] \(inf\) must be finite"),
        ([1.0, 2.0], [0], r"group_ids must be int64 \[2\].*\[1\]"),
        ([1, 2], [0, 0], r"rewards must be a float tensor \[B\], got torch.int64"),
    ],
)
def test_errors_name_the_value(rewards, ids, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.tensor(rewards), torch.tensor(ids), True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("normalize_by_std", [False, True])
def test_rewards_of_any_dtype_are_taken_and_answered_as_fp32(kernels, dtype, normalize_by_std):
    rewards, ids = make_groups(num_groups=20)
    rewards = rewards.to(dtype)
    advantages = group_advantages(rewards, ids, normalize_by_std)
    assert advantages.dtype == torch.float32
    assert torch.equal(advantages, group_advantages(rewards.float(), ids, normalize_by_std))
    expected = group_advantages_ref(rewards.float(), ids, normalize_by_std)
    assert (advantages.double() - expected).abs().max() <= torch.finfo(
        torch.float32
    ).eps * expected.abs().max()
    equal = torch.full((7,), 0.1, dtype=dtype)
    assert (group_advantages(equal, torch.zeros(7, dtype=torch.int64), normalize_by_std) == 0).all()


def test_a_reward_that_fp32_cannot_hold_is_refused(kernels):
    """On a GPU, where a look at the rewards would stop the stream, its group has no advantage."""
    case = torch.tensor([0.0, 1e39], dtype=torch.float64), torch.zeros(2, dtype=torch.int64), True
    if kernels == "triton":
        assert group_advantages(*case).isnan().all()
        return
    with pytest.raises(ValueError, match=r"rewards\[1\] \(1e\+39\) must be finite in fp32"):
        group_advantages(*case)
