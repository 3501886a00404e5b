"""Kernel of value_loss.py: loss, gradient and statistics of a block of tokens in one program.

A program leaves partial sums, which partial_sums_triton.py adds up in a fixed order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.kernels.aot import aot_case
from megarl.kernels.partial_sums_triton import reduce_partials
from megarl.kernels.tiles_triton import limit, load

_BLOCK = 1024


@triton.jit
def _value_loss_kernel(
    values_ptr,
    old_values_ptr,
    returns_ptr,
    weights_ptr,
    gradient_ptr,
    partials_ptr,
    num_tokens,
    clip_eps,
    HAS_CLIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one block of tokens per program. The partial sums [6, blocks] are the loss, then the fields of
    ValueLossStats."""
    block = tl.program_id(0)
    i = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_range = i < num_tokens
    weight = load(weights_ptr, i, in_range)
    exists = weight != 0
    value = load(values_ptr, i, exists)
    target = load(returns_ptr, i, exists)
    error = value - target
    loss = error * error
    gradient = error
    is_clipped = exists & False
    if HAS_CLIP:
        old = load(old_values_ptr, i, exists)
        clipped_error = old + limit(value - old, -clip_eps, clip_eps) - target
        is_clipped = (clipped_error * clipped_error > loss) & (tl.abs(value - old) > clip_eps)
        loss = tl.where(is_clipped, clipped_error * clipped_error, loss)
        gradient = tl.where(is_clipped, 0.0, gradient)
    tl.store(gradient_ptr + i, gradient * weight, mask=in_range)
    blocks = tl.num_programs(0)
    partials_ptr += block
    tl.store(partials_ptr, tl.sum(loss * weight) / 2)
    tl.store(partials_ptr + blocks, tl.sum(is_clipped.to(tl.float32)))
    tl.store(partials_ptr + 2 * blocks, tl.sum(error))
    tl.store(partials_ptr + 3 * blocks, tl.sum(error * error))
    tl.store(partials_ptr + 4 * blocks, tl.sum(target))
    tl.store(partials_ptr + 5 * blocks, tl.sum(target * target))


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip_eps: float | None
) -> tuple[Tensor, ...]:
    """Return (loss, gradient [N], the fields of ValueLossStats), fp32."""
    columns = [x.contiguous() for x in (values, old_values, returns, weights)]
    gradient = torch.empty_like(columns[0], dtype=torch.float32)
    num_blocks = max(triton.cdiv(len(values), _BLOCK), 1)
    partials = torch.empty(6, num_blocks, dtype=torch.float32, device=values.device)
    _value_loss_kernel[(num_blocks,)](
        *columns,
        gradient,
        partials,
        len(values),
        clip_eps or 0.0,
        HAS_CLIP=clip_eps is not None,
        BLOCK=_BLOCK,
    )
    loss, *stats = reduce_partials(partials)
    return loss, gradient, *stats


AOT_CASES = [
    aot_case(
        _value_loss_kernel,
        dict(HAS_CLIP=True, BLOCK=_BLOCK),
        {"num_tokens": "i32", "clip_eps": "fp32"},
        variant="clipped",
    )
]
