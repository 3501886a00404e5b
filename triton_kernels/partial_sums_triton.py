"""Add up the partial sums of a kernel that writes one number per block and statistic, in a fixed order and
without atomics.

    totals[r] = sum_b partials[r, b]        of row max_row: max(0, max_b partials[r, b])

4 bytes per block and statistic, about 1/1000 of what the first launch read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.kernels.aot import aot_case

_BLOCK = 1024


@triton.jit
def _reduce_kernel(partials_ptr, totals_ptr, num_blocks, MAX_ROW: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_blocks, BLOCK):
        i = start + tl.arange(0, BLOCK)
        part = tl.load(partials_ptr + row * num_blocks + i, mask=i < num_blocks, other=0.0)
        # A comparison with NaN fails: a `part` that is NaN is taken, and a `total` that is NaN would be lost.
        largest = tl.where((part <= total) | (total != total), total, part)
        total = tl.where(row == MAX_ROW, largest, total + part)
    is_max = row == MAX_ROW
    result = tl.where(is_max, tl.max(total, 0) + 0.0 * tl.sum(total, 0), tl.sum(total, 0))
    tl.store(totals_ptr + row, result)


def reduce_partials(partials: Tensor, max_row: int = -1) -> tuple[Tensor, ...]:
    """Return the totals of partials [R, blocks] fp32: R scalars."""
    if partials.shape[1] == 1:
        return partials[:, 0].unbind()
    totals = torch.empty(partials.shape[0], dtype=torch.float32, device=partials.device)
    _reduce_kernel[(len(totals),)](partials, totals, partials.shape[1], MAX_ROW=max_row, BLOCK=_BLOCK)
    return totals.unbind()


AOT_CASES = [
    aot_case(_reduce_kernel, dict(MAX_ROW=7, BLOCK=_BLOCK), {"num_blocks": "i32"}, element="partial sum")
]
