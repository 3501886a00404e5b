"""Triton kernels of log_probs.py: two passes over the logits, one read each, one write in the second.

    logits_stats   per row: maximum m, s = sum exp(y - m), u = sum exp(y - m) (y - m), y[target]
                   log_q = y[target] - m - log s,   entropy = log s - u / s
    dlogits        row_scale p + entropy_scale p log2(p) + at_target 1[j = target],   p = exp(y - m - log s), s over all ranks

6 bytes per bf16 logit (8 with fp32 logits and bf16 gradients, as the fused head has them), no atomics, and
every row by itself: bitwise the same whatever other rows there are. y = logits / temperature.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.kernels.aot import aot_case

_BLOCK, _NUM_WARPS = 4096, 8
_MIN_BLOCK = 128


@triton.jit
def _logits_stats_kernel(
    logits,
    targets,
    log_q_out,
    entropy_out,
    m_out,
    log_s_out,
    num_columns,
    row_stride,
    temperature,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_stride
    # The finite start, and floor, of everything: -inf logits (banned tokens) then make no NaN out of 0 * inf.
    # They count nothing, so that # s is 0 in a row that has nothing else.
    m = -1e30
    s = 0.0
    u = 0.0
    for first in range(0, num_columns, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        y = tl.load(base + columns, mask=columns < num_columns, other=-1e30).to(tl.float32) / temperature
        y = tl.maximum(y, -1e30, propagate_nan=tl.PropagateNan.ALL)
        new_m = tl.maximum(m, tl.max(y, 0))
        scale = tl.exp(m - new_m)
        p = tl.where((columns < num_columns) & (y != -1e30), tl.exp(y - new_m), 0.0)
        if ENTROPY:
            u = scale * (u + s * (m - new_m)) + tl.sum(p * (y - new_m), 0)
        s = s * scale + tl.sum(p, 0)
        m = new_m
    y_target = tl.load(base + tl.load(targets + row)).to(tl.float32) / temperature
    tl.store(log_q_out + row, y_target - m - tl.log(s))
    # Not their sum: where logits are large, it has lost the digits of log s.
    tl.store(m_out + row, m)
    tl.store(log_s_out + row, tl.log(s))
    if ENTROPY:
        tl.store(entropy_out + row, tl.log(s) - u / s)


@triton.jit
def _dlogits_kernel(
    logits,
    shift,
    targets,
    at_target,
    row_scale,
    entropy_scale,
    out,
    num_real,
    num_columns,
    row_stride,
    out_stride,
    temperature,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = (
        tl.load(logits + row * row_stride + columns, mask=columns < num_real, other=-1e30).to(tl.float32)
        / temperature
    )
    # A smaller probability counts as 2**-100: see log_probs.py.
    log2_p = (y - tl.load(shift + 2 * row) - tl.load(shift + 2 * row + 1)) * 1.4426950408889634
    log2_p = tl.maximum(log2_p, -100.0, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.load(row_scale + row)
    if ENTROPY:
        scale += tl.load(entropy_scale + row) * log2_p
    gradient = tl.exp2(log2_p) * scale + tl.where(
        columns == tl.load(targets + row), tl.load(at_target + row), 0.0
    )
    gradient = tl.where(columns < num_real, gradient, 0.0)
    tl.store(out + row * out_stride + columns, gradient.to(out.dtype.element_ty), mask=columns < num_columns)


def _block(num_columns: int) -> int:
    return min(max(triton.next_power_of_2(num_columns), _MIN_BLOCK), _BLOCK)


def logits_stats(
    logits: Tensor, targets: Tensor, num_real: int, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (log_q at the targets, entropy or zeros, maximum, log of the sum of exp(y - maximum)) of the
    first `num_real` > 0 columns, each [N] fp32."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    log_q, entropy, m, log_s = torch.zeros(4, len(logits), dtype=torch.float32, device=logits.device)
    _logits_stats_kernel[(len(logits),)](
        logits,
        targets,
        log_q,
        entropy,
        m,
        log_s,
        num_real,
        logits.stride(0),
        temperature,
        BLOCK=_block(num_real),
        ENTROPY=with_entropy,
        num_warps=_NUM_WARPS,
    )
    return log_q, entropy, m, log_s


def dlogits(
    logits: Tensor,
    shift: Tensor,
    targets: Tensor,
    at_target: Tensor,
    row_scale: Tensor,
    entropy_scale: Tensor | None,
    num_real: int,
    temperature: float,
    out: Tensor,
) -> Tensor:
    """Write the gradient [N, V_tp] into `out`, 0 from column `num_real` on, and return it. `out` may be
    `logits`. shift: [N, 2] of m and log s."""
    if out.stride(1) != 1:
        return out.copy_(
            dlogits(
                logits,
                shift,
                targets,
                at_target,
                row_scale,
                entropy_scale,
                num_real,
                temperature,
                torch.empty_like(out, memory_format=torch.contiguous_format),
            )
        )
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    block = _block(logits.shape[1])
    _dlogits_kernel[(len(logits), triton.cdiv(logits.shape[1], block))](
        logits,
        shift.contiguous(),
        targets,
        at_target,
        row_scale,
        entropy_scale,
        out,
        num_real,
        logits.shape[1],
        logits.stride(0),
        out.stride(0),
        temperature,
        BLOCK=block,
        ENTROPY=entropy_scale is not None,
        num_warps=_NUM_WARPS,
    )
    # A launch is invisible to autograd, whose check of saved tensors refuses a second backward through
    # overwritten ones.
    torch.autograd.graph.increment_version(out)
    return out


_TYPES = {
    "targets": "*i64",
    "num_columns": "i32",
    "num_real": "i32",
    "row_stride": "i32",  # as Triton passes every integer that fits
    "out_stride": "i32",
    "temperature": "fp32",
}
AOT_CASES = [
    aot_case(
        kernel,
        constants | more,
        _TYPES | {"logits": dtype, "out": "*bf16"},
        num_warps=_NUM_WARPS,
        variant=f"{dtype[1:]} logits" + (", entropy" if entropy else ""),
        element="logit",
    )
    for dtype, entropy in (("*bf16", True), ("*fp32", True), ("*fp32", False))
    for constants in [{"BLOCK": _BLOCK, "ENTROPY": entropy}]
    for kernel, more in (
        (_logits_stats_kernel, {}),
        (_dlogits_kernel, {} if entropy else {"entropy_scale": None}),
    )
]
