"""`reduce_partials` against sums and maxima in float64, with NaN in any block.

    pytest tests/kernels/test_partial_sums.py

Bound: a sum of n numbers of size 1 in fp32 has an error of at most n eps."""

from __future__ import annotations

import math

import pytest
import torch

BLOCK, EPS = 4, torch.finfo(torch.float32).eps


@pytest.fixture
def reduce_partials(kernels, monkeypatch):
    """The function, with a block so small that the kernel's loop runs several times."""
    from megarl.kernels import partial_sums_triton

    monkeypatch.setattr(partial_sums_triton, "_BLOCK", BLOCK)
    return partial_sums_triton.reduce_partials


@pytest.mark.parametrize("kernels", ["interpret"], indirect=True)
def test_sums_and_the_maximum(reduce_partials):
    for num_blocks in (1, 3, BLOCK, 2 * BLOCK + 1):
        partials = torch.rand(3, num_blocks, generator=torch.Generator().manual_seed(num_blocks))
        found = reduce_partials(partials, max_row=2)
        wanted = [*partials[:2].double().sum(1), partials[2].double().max()]
        for value, exact in zip(found, wanted, strict=True):
            assert abs(value.item() - exact.item()) <= num_blocks * EPS


@pytest.mark.parametrize("kernels", ["interpret"], indirect=True)
def test_nan_in_any_block_is_in_the_result_of_its_row_only(reduce_partials):
    """Also one that is followed, BLOCK or more numbers later in its lane, by numbers that are not NaN."""
    num_blocks = 3 * BLOCK
    for position in range(num_blocks):
        for row in (0, 1):
            partials = torch.ones(2, num_blocks)
            partials[row, position] = math.nan
            found = [one.item() for one in reduce_partials(partials, max_row=1)]
            other = [num_blocks, 1.0][1 - row]
            assert math.isnan(found[row]) and found[1 - row] == other, (position, row)
