"""Triton kernel of linear_log_probs.py: hidden weight^T in tiles that stay in registers; each tile writes (m,
s, u) per row.

    m = max y,   s = sum exp(y - m),   u = sum exp(y - m) (y - m)    over the tile's columns, y = logits / temperature

A persistent kernel: one program per multiprocessor walks the tiles, GROUP_M row blocks at a time so that a
column block of the weight stays in the L2 cache. What keeps the 128 x 256 tile free of register spills:
columns beyond the vocabulary become -1e30, a number, so that nothing has to be selected twice, and the
target's logit is a dot product of its own instead of a comparison in the tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.kernels.aot import NUM_HIDDEN, VOCAB_SIZE, AotCase, aot_case


class Tiles(NamedTuple):
    """Tiles of BM rows and BN columns, BK hidden values at a time, and how they are launched."""

    BM: int
    BN: int
    BK: int
    num_warps: int
    num_stages: int
    capabilities: tuple[int, ...] = (80, 90, 100)
    """Compute capabilities on which these tiles neither spill registers nor need too much shared memory
    (`tools/check_kernels.py`). They are tried on no other."""


CANDIDATES = (
    Tiles(128, 256, 64, num_warps=8, num_stages=3),
    Tiles(128, 256, 64, num_warps=8, num_stages=4),
    Tiles(128, 128, 64, num_warps=8, num_stages=3),  # two blocks share a multiprocessor of an H100
    Tiles(256, 256, 64, num_warps=8, num_stages=2, capabilities=()),  # spills
    Tiles(128, 256, 64, num_warps=8, num_stages=5, capabilities=()),  # too much shared memory
)
_INTERPRETED = Tiles(32, 128, 32, num_warps=8, num_stages=3)
_GROUP_M = 8
_ROWS_PER_LAUNCH = 8192
"""Bounds what the tiles write: 12 bytes per row and 256 columns, 58 MB for 152k columns."""


@triton.jit
def _linear_stats_kernel(
    hidden,
    weight,
    m_out,
    s_out,
    u_out,
    num_rows,
    num_columns,
    num_hidden,
    hidden_stride,
    weight_stride,
    inverse_temperature,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    ENTROPY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_m = tl.cdiv(num_rows, BM)
    num_n = tl.cdiv(num_columns, BN)
    hidden_blocks = tl.make_tensor_descriptor(
        hidden, shape=[num_rows, num_hidden], strides=[hidden_stride, 1], block_shape=[BM, BK]
    )
    weight_blocks = tl.make_tensor_descriptor(
        weight, shape=[num_columns, num_hidden], strides=[weight_stride, 1], block_shape=[BN, BK]
    )
    per_group = GROUP_M * num_n
    for tile in tl.range(tl.program_id(0), num_m * num_n, NUM_PROGRAMS, flatten=True):
        group = tile // per_group
        group_size = min(num_m - group * GROUP_M, GROUP_M)
        block_m = group * GROUP_M + (tile % per_group) % group_size
        block_n = (tile % per_group) // group_size
        y = tl.zeros((BM, BN), tl.float32)
        for k in range(0, num_hidden, BK):
            x, w = hidden_blocks.load([block_m * BM, k]), weight_blocks.load([block_n * BN, k])
            y = tl.dot(x, w.T, y, input_precision=PRECISION)
        columns = block_n * BN + tl.arange(0, BN)
        y = tl.where(columns[None, :] < num_columns, y * inverse_temperature, -1e30)
        m = tl.max(y, 1)
        y = y - m[:, None]
        p = tl.exp2(y * 1.4426950408889634)
        rows = block_m * BM + tl.arange(0, BM)
        out = block_n.to(tl.int64) * num_rows + rows
        tl.store(m_out + out, m, mask=rows < num_rows)
        tl.store(s_out + out, tl.sum(p, 1), mask=rows < num_rows)
        if ENTROPY:
            tl.store(u_out + out, tl.sum(p * y, 1), mask=rows < num_rows)


@triton.jit
def _target_logits_kernel(
    hidden, weight, targets, out, num_hidden, hidden_stride, weight_stride, temperature, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x = hidden + row * hidden_stride
    w = weight + tl.load(targets + row) * weight_stride
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_hidden, BLOCK):
        k = first + tl.arange(0, BLOCK)
        inside = k < num_hidden
        total += tl.load(x + k, mask=inside, other=0.0).to(tl.float32) * tl.load(
            w + k, mask=inside, other=0.0
        ).to(tl.float32)
    tl.store(out + row, tl.sum(total, 0) / temperature)


def can_run(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether tensor descriptors (TMA) can read the inputs, and the kernel computes in their dtype.

    They need contiguous columns, rows and starts at multiples of 16 bytes. fp32 would be TF32 on CUDA; in
    the interpreter, which multiplies the raw bits of bf16, it is fp32 that runs."""
    aligned = all(
        x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
        for x in (hidden, weight)
    )
    return aligned and hidden.dtype in (
        (torch.bfloat16, torch.float16) if hidden.is_cuda else (torch.float16, torch.float32)
    )


def tiles_of(device: torch.device) -> tuple[Tiles, ...]:
    """Return the tiles to try on a device; none on a kind of GPU for which no tiles were checked."""
    if device.type != "cuda":
        return (_INTERPRETED,)
    major, minor = torch.cuda.get_device_capability(device)
    # sm_86 and sm_89 have less shared memory than sm_80; sm_103 has what sm_100 has.
    family = 100 if major == 10 else 10 * major + minor
    return tuple(tiles for tiles in CANDIDATES if family in tiles.capabilities)


def linear_stats(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, with_entropy: bool, tiles: Tiles
) -> tuple[Tensor, ...]:
    """Return (log_q at the targets, entropy or zeros, maximum, log of the sum of exp(y - maximum)) over
    the rows of `weight`, each [N] fp32; of inputs that `can_run`, N and V > 0."""
    parts = [
        _stats_of_rows(
            hidden[first : first + _ROWS_PER_LAUNCH],
            weight,
            targets[first : first + _ROWS_PER_LAUNCH],
            temperature,
            with_entropy,
            tiles,
        )
        for first in range(0, len(hidden), _ROWS_PER_LAUNCH)
    ]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def _stats_of_rows(hidden, weight, targets, temperature, with_entropy, tiles) -> tuple[Tensor, ...]:
    num_rows, num_hidden = hidden.shape
    device, num_columns = hidden.device, len(weight)
    num_programs, precision = 1, "ieee"
    if hidden.is_cuda:
        num_programs, precision = torch.cuda.get_device_properties(device).multi_processor_count, "tf32"
        triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device)
        )
    num_n = triton.cdiv(num_columns, tiles.BN)
    m, s, u = (torch.empty(num_n, num_rows, dtype=torch.float32, device=device) for _ in range(3))
    _linear_stats_kernel[(num_programs,)](
        hidden,
        weight,
        m,
        s,
        u,
        num_rows,
        num_columns,
        num_hidden,
        hidden.stride(0),
        weight.stride(0),
        1 / temperature,
        BM=tiles.BM,
        BN=tiles.BN,
        BK=tiles.BK,
        GROUP_M=_GROUP_M,
        NUM_PROGRAMS=num_programs,
        ENTROPY=with_entropy,
        PRECISION=precision,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    y_target = torch.empty(num_rows, dtype=torch.float32, device=device)
    block = min(triton.next_power_of_2(num_hidden), 1024)
    _target_logits_kernel[(num_rows,)](
        hidden,
        weight,
        targets,
        y_target,
        num_hidden,
        hidden.stride(0),
        weight.stride(0),
        temperature,
        BLOCK=block,
        num_warps=4,
    )
    largest = m.amax(0)
    offset = m - largest
    scale = offset.exp()
    total = (s * scale).sum(0)
    log_total = total.log()
    entropy = torch.zeros_like(total)
    if with_entropy:
        entropy = log_total - (scale * (u + s * offset)).sum(0) / total
    return y_target - largest - log_total, entropy, largest, log_total


_TYPES = {
    "hidden": "*bf16",
    "weight": "*bf16",
    "targets": "*i64",
    "num_rows": "i32",
    "num_columns": "i32",
    "num_hidden": "i32",
    "hidden_stride": "i32",  # as Triton passes every integer that fits
    "weight_stride": "i32",
    "inverse_temperature": "fp32",
    "temperature": "fp32",
}
_MUST_USE = {
    80: ("mma.sync",),
    90: ("wgmma.mma_async", "cp.async.bulk.tensor"),
    100: ("tcgen05.mma", "cp.async.bulk.tensor"),
}


def aot_case_of(tiles: Tiles, entropy: bool, capabilities: tuple[int, ...]) -> AotCase:
    """Return the `AotCase` by which the kernel is compiled ahead of time with these tile sizes."""
    constants = {"BM": tiles.BM, "BN": tiles.BN, "BK": tiles.BK, "GROUP_M": _GROUP_M, "NUM_PROGRAMS": 132}
    outputs = 3 if entropy else 2
    return aot_case(
        _linear_stats_kernel,
        constants | {"ENTROPY": entropy, "PRECISION": "tf32"},
        _TYPES,
        aligned=("num_hidden",),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        capabilities=capabilities,
        must_use=_MUST_USE,
        variant=f"{tiles.BM} x {tiles.BN} x {tiles.BK}, {tiles.num_stages} stages"
        + (", entropy" if entropy else ""),
        element="logit",
        num_elements=tiles.BM * tiles.BN,
        # Each input once per launch, the rest from the L2 cache, and what a tile leaves behind.
        bytes_per_element=2 * NUM_HIDDEN * (1 / _ROWS_PER_LAUNCH + 1 / VOCAB_SIZE) + 4 * outputs / tiles.BN,
    )


AOT_CASES = [
    *(
        aot_case_of(tiles, entropy, tiles.capabilities)
        for tiles in CANDIDATES
        if tiles.capabilities
        for entropy in (True, False)
    ),
    aot_case(_target_logits_kernel, {"BLOCK": 1024}, _TYPES, aligned=("num_hidden",), element="hidden value"),
]
