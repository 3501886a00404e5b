"""The copier against `torch._foreach_copy_`, bit for bit: every element inside a rectangle and none outside
it.

Conversion to bfloat16 is also compared with its definition (the nearest value, ties to even), computed in
float64. GPU cases run where there is one. Run: pytest
tests/reshard/test_copier.py"""

import mmap
import random
import shutil
import sys
import threading

import pytest
import torch

from megarl.reshard import copier
from megarl.reshard.copier import CopyPlan, copy_rects
from megarl.reshard.digest import Digest

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PAIRS = [
    (dtype, dtype)
    for dtype in (
        torch.int8,
        torch.bool,
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.int64,
        torch.float64,
    )
]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PAIRS += [(src, dst) for src in FLOATS for dst in FLOATS if src != dst]
INTEGER_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request):
    return request.param


@pytest.fixture(params=["extension", "pytorch"])
def executor(request, monkeypatch):
    if request.param == "pytorch":
        monkeypatch.setattr(copier, "extension_for", lambda device_type: None)
    return request.param


def bits(tensor):
    return tensor.contiguous().view(INTEGER_OF[tensor.element_size()])


def random_matrix(rows, cols, dtype, device, generator):
    values = torch.randn(rows, cols, generator=generator) * 50
    return (values > 0 if dtype is torch.bool else values.to(dtype)).to(device)


def random_views(dst, src, rng):
    """Disjoint rectangles that cover part of `dst`, each read from a random place of `src`: odd offsets, odd
    widths, single rows."""
    dst_views, src_views = [], []
    row = 0
    while row < dst.shape[0]:
        rows = min(rng.choice([1, 1, 3, 17, 64]), dst.shape[0] - row)
        col = 0
        while col < dst.shape[1]:
            cols = min(rng.choice([1, 5, 16, 33, 256, dst.shape[1]]), dst.shape[1] - col)
            r, c = rng.randint(0, src.shape[0] - rows), rng.randint(0, src.shape[1] - cols)
            if rng.random() < 0.8:
                dst_views.append(dst[row : row + rows, col : col + cols])
                src_views.append(src[r : r + rows, c : c + cols])
            col += cols
        row += rows
    return dst_views, src_views


def test_extension_is_built_where_it_can_be():
    """The tests below must not pass because both sides are PyTorch."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler")
    from megarl import _C

    assert copier.extension_for("cpu") is _C
    assert _C.build_info.startswith("with CUDA" if _C.built_with_cuda else "for the CPU only")


@pytest.mark.nightly_but_one_in(3)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    ("src_dtype", "dst_dtype"), PAIRS, ids=lambda dtype: str(dtype).removeprefix("torch.")
)
def test_random_rectangles_equal_foreach_copy(src_dtype, dst_dtype, num_threads, device):
    rng, generator = random.Random(num_threads), torch.Generator().manual_seed(0)
    # 1.5 MB of bytes or more, so that three threads do share it, and splits fall inside rows.
    shape = (700, 2501)
    src = random_matrix(*shape, src_dtype, device, generator)
    dst = random_matrix(*shape, dst_dtype, device, generator)
    expected = dst.clone()
    views, src_views = random_views(dst, src, rng)
    offsets = [divmod(view.storage_offset(), shape[1]) for view in views]
    torch._foreach_copy_(
        [expected[r : r + v.shape[0], c : c + v.shape[1]] for (r, c), v in zip(offsets, views, strict=True)],
        src_views,
    )

    plan = CopyPlan(views, src_views, num_threads)
    plan.run()

    assert torch.equal(bits(dst), bits(expected))
    assert plan.bytes == sum(view.numel() for view in views) * dst.element_size()


def test_whole_and_aligned_matrices(device, executor):
    """Contiguous on both sides, columns on one side only, and shapes that vectors of 16 bytes fit: the fast
    paths."""
    generator = torch.Generator().manual_seed(0)
    for src_dtype, dst_dtype in PAIRS:
        src = random_matrix(256, 512, src_dtype, device, generator)
        dst = torch.zeros(3, 256, 512, dtype=dst_dtype, device=device)
        copy_rects([dst[0], dst[1][:, 128:384], dst[2][:, :256]], [src, src[:, :256], src[:, 256:]])
        expected = torch.zeros_like(dst)
        expected[0] = src
        expected[1][:, 128:384] = src[:, :256]
        expected[2][:, :256] = src[:, 256:]
        assert torch.equal(bits(dst), bits(expected)), (src_dtype, dst_dtype)


@pytest.mark.nightly_but_one_in(3)
@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize(
    ("src_dtype", "dst_dtype"), PAIRS, ids=lambda dtype: str(dtype).removeprefix("torch.")
)
def test_large_plans_bypass_the_caches(src_dtype, dst_dtype, num_threads):
    """From 16 MB on rows are written with non-temporal stores, whose heads and tails differ from row to row
    here."""
    cols = 2001
    rows = (1 << 24) // (cols * dst_dtype.itemsize) + 2
    src = random_matrix(rows, cols + 5, src_dtype, "cpu", torch.Generator().manual_seed(0))
    dst = torch.zeros(rows, cols + 7, dtype=dst_dtype)
    plan = CopyPlan([dst[:, 3 : 3 + cols]], [src[:, 2 : 2 + cols]], num_threads)
    plan.run()
    assert plan.bytes >= 1 << 24
    assert torch.equal(bits(dst[:, 3 : 3 + cols]), bits(src[:, 2 : 2 + cols].to(dst_dtype)))
    assert not dst[:, :3].any() and not dst[:, 3 + cols :].any()


def sparse(rows, cols):
    """A matrix of bfloat16 that takes memory only where it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, 2 * rows * cols, flags=flags), dtype=torch.bfloat16).view(
        rows, cols
    )


def test_offsets_beyond_32_bits(executor):
    """Rows of more than 2**31 elements."""
    wide = (1 << 31) + 48
    src, dst = sparse(3, wide), sparse(3, wide)
    values = torch.arange(27.0).view(3, 9).bfloat16()
    src[:, -11:-2] = values
    copy_rects([dst[:, -9:]], [src[:, -11:-2]])
    assert torch.equal(dst[:, -9:], values) and not dst[:, -20:-9].any()
    assert Digest([dst[:, -9:]]).full() == Digest([values]).full()


def special_floats():
    """Bit patterns of float32 around everything that rounding can get wrong, and a million random ones."""
    edges = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000], dtype=torch.int64)
    exponents = (
        torch.arange(0, 0x8000, 0x40, dtype=torch.int64) << 16
    )  # denormal to infinity and NaN, even mantissas
    odd = exponents + (1 << 16)
    patterns = torch.cat([(base[:, None] + edges).flatten() for base in (exponents, odd)])
    random_patterns = torch.randint(0, 2**31, (1 << 20,), generator=torch.Generator().manual_seed(0))
    positive = torch.cat([patterns.clamp(max=2**31 - 1), random_patterns]).to(torch.int32)
    return torch.cat([positive, positive | torch.tensor(-(2**31), dtype=torch.int32)]).view(torch.float32)


def nearest_bfloat16(values):
    """Nearest of the two bfloat16 neighbours of finite fp32 values, ties to the even one, in float64, which
    holds both exactly.

    Above the largest bfloat16 the next one counts as 2**128, which becomes infinity (IEEE 754, 4.3.1)."""
    low = (values.view(torch.int32) >> 16).to(torch.int16)
    high = low + 1
    wide_low, wide_high = (pattern.view(torch.bfloat16).double() for pattern in (low, high))
    wide_high = torch.where(wide_high.isinf(), wide_high.sign() * 2.0**128, wide_high)
    to_low, to_high = (values.double() - wide_low).abs(), (wide_high - values.double()).abs()
    take_high = (to_high < to_low) | ((to_high == to_low) & (low % 2 != 0))
    return torch.where(take_high, high, low)


def test_float32_to_bfloat16_is_nearest_even(device):
    values = special_floats()
    result = torch.empty(values.shape, dtype=torch.bfloat16, device=device)
    copy_rects([result], [values.to(device)])
    result = result.cpu()

    finite = values.isfinite()
    assert torch.equal(bits(result)[finite], nearest_bfloat16(values[finite]))
    assert torch.equal(result[values.isinf()].float(), values[values.isinf()])
    assert result[values.isnan()].isnan().all()
    # PyTorch's own NaN differs between its vector and scalar code, so NaN is compared as NaN above and left
    # out here.
    assert torch.equal(bits(result)[~values.isnan()], bits(values.bfloat16())[~values.isnan()])


def test_float32_to_float16_is_nearest_even(device):
    """PyTorch converts with the processor's instruction; rows of one element go through the copier's own
    arithmetic."""
    values = special_floats()
    expected = values.half()
    in_one_row, in_rows = (
        torch.empty_like(expected, device=device),
        torch.empty(len(values), 2, dtype=torch.float16, device=device),
    )
    copy_rects([in_one_row, in_rows[:, :1]], [values.to(device), values[:, None].to(device)])
    for result in (in_one_row.cpu(), in_rows[:, 0].cpu()):
        assert torch.equal(bits(result)[~values.isnan()], bits(expected)[~values.isnan()])
        assert result[values.isnan()].isnan().all()


def test_every_16_bit_float_to_the_others(device):
    """65536 values of each format, in one row and in rows of one."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for src_dtype, dst_dtype in [
        (a, b) for a, b in PAIRS if a.itemsize == 2 and a.is_floating_point and a != b
    ]:
        values = patterns.view(src_dtype)
        expected = values.to(dst_dtype)
        in_one_row, in_rows = (
            torch.empty_like(expected, device=device),
            torch.empty(len(values), 2, dtype=dst_dtype, device=device),
        )
        copy_rects([in_one_row, in_rows[:, :1]], [values.to(device), values[:, None].to(device)])
        for result in (in_one_row.cpu(), in_rows[:, 0].cpu()):
            assert torch.equal(bits(result)[~values.isnan()], bits(expected)[~values.isnan()])
            assert result[values.isnan()].isnan().all()


def test_every_bfloat16_to_float32_is_exact(device):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    result = torch.empty(values.shape, dtype=torch.float32, device=device)
    copy_rects([result], [values.to(device)])
    assert torch.equal(bits(result.cpu()), bits(values).to(torch.int32) << 16)


def test_plan_follows_the_values_not_the_copy(device, executor):
    src, dst = torch.arange(12.0, device=device).view(3, 4), torch.zeros(3, 6, device=device)
    plan = CopyPlan([dst[:, 1:4]], [src[:, 1:]])
    for factor in (1, 10):
        src.mul_(factor)
        plan.run()
        assert torch.equal(dst[:, 1:4], src[:, 1:]) and not dst[:, [0, 4, 5]].any()
    assert plan.bytes == 3 * 3 * 4


def test_nothing_to_copy(executor):
    copy_rects([], [])
    empty = torch.empty(0, 5)
    dst = torch.zeros(2, 3)
    copy_rects([empty, dst[:, 3:], dst[:1]], [empty, dst[:, 3:], torch.ones(1, 3)])
    assert dst.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert CopyPlan([], []).bytes == 0


def test_vectors_single_columns_and_parameters(device, executor):
    """Strides of dimensions of size 1 mean nothing, and parameters are written although they require
    gradients."""
    weight = torch.nn.Parameter(torch.zeros(4, 6, device=device))
    column = torch.arange(1.0, 5.0, device=device)
    copy_rects([weight[:, 2:3], weight[0, 3:]], [column[None].t(), torch.full((3,), 9.0, device=device)])
    assert weight[:, 2].tolist() == [1, 2, 3, 4] and weight[0].tolist() == [0, 0, 1, 9, 9, 9]
    assert weight.requires_grad and weight.grad is None


def test_moved_storage_is_refused(executor):
    src, dst = torch.ones(4), torch.zeros(4)
    plan = CopyPlan([dst], [src])
    dst.data = torch.zeros(4)
    with pytest.raises(RuntimeError, match="Build a new plan"):
        plan.run()


def test_lock_of_the_interpreter_is_released():
    """While another thread copies for about a third of a second, this one must get to run."""
    src, dst = torch.ones(1 << 20), torch.zeros(1 << 20)
    plan = CopyPlan([dst] * 500, [src] * 500)
    started, finished = threading.Event(), threading.Event()

    def copy():
        started.set()
        plan.run()
        finished.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # so that only a release by the copier itself can let this thread in
    try:
        thread = threading.Thread(target=copy)
        thread.start()
        started.wait()
        assert not finished.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join(timeout=60)
    assert finished.is_set()


WIDE = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("dst", "src", "message"),
    [
        ([WIDE], [], r"dst \(1 views\) and src \(0 views\) must pair up"),
        ([WIDE, WIDE[:, :5]], [WIDE, WIDE], r"pair 1: dst shape \[4, 5\] must equal src shape \[4, 6\]"),
        ([WIDE], [WIDE.double()], "pair 0: torch.float64 to torch.float32 is neither"),
        ([WIDE], [torch.zeros(4, 6, dtype=torch.int32)], "pair 0: torch.int32 to torch.float32 is neither"),
        ([WIDE], [torch.zeros(6, 4).t()], r"pair 0: src strides \[1, 4\] must end in 1"),
        (
            [torch.zeros(1, 6).expand(4, 6)],
            [WIDE],
            r"pair 0: dst strides \[0, 1\] make rows of 6 elements overlap",
        ),
        ([WIDE[None]], [WIDE[None]], r"pair 0: a view must have 1 or 2 dimensions, not shape \[1, 4, 6\]"),
        ([WIDE.to("meta")], [WIDE.to("meta")], r"pair 0: dst \(meta\)"),
    ],
)
def test_bad_views_are_refused(dst, src, message, executor):
    with pytest.raises(ValueError, match=message):
        copy_rects(dst, src)
    with pytest.raises(ValueError, match=r"num_threads \(0\) must be >= 1"):
        CopyPlan([WIDE], [WIDE], num_threads=0)


GOOD = {"src": 64, "dst": 64, "rows": 2, "cols": 3, "src_ld": 3, "dst_ld": 3, "mode": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": -1}, r"rect 1: rows \(-1\) must be >= 0"),
        ({"cols": -1, "src_ld": -1, "dst_ld": -1}, r"rect 1: cols \(-1\) must be >= 0"),
        ({"src_ld": 2}, r"rect 1: src_ld \(2\) must be >= cols \(3\)"),
        ({"dst_ld": 2}, r"rect 1: dst_ld \(2\) must be >= cols \(3\)"),
        ({"mode": 3}, r"rect 1: mode \(3\) must be 1, 2, 4, 8"),
        ({"mode": 108}, r"rect 1: mode \(108\) must be 1, 2, 4, 8"),
        ({"src": 0}, r"rect 1: src \(0\) must be an address"),
        ({"dst": 66}, r"rect 1: dst \(66\) must be an address aligned"),
        (
            {"rows": 2**40, "src_ld": 2**40, "dst_ld": 2**40},
            r"rect 1: rows \(1099511627776\) x leading dimension must fit",
        ),
    ],
)
def test_extension_checks_every_rectangle(change, message):
    extension = pytest.importorskip("megarl._C")
    rects = torch.tensor([list(GOOD.values()), list((GOOD | change).values())], dtype=torch.int64)
    extension.CopyPlan(rects[:1])
    with pytest.raises(ValueError, match=message):
        extension.CopyPlan(rects)
    with pytest.raises(TypeError):
        extension.CopyPlan(rects[:, :6])
    with pytest.raises(ValueError, match=r"num_threads \(0\)"):
        extension.CopyPlan(rects[:1]).run(0)
