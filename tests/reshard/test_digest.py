"""Digests: the extension and the PyTorch twin against the definition in csrc/digest.h, written again here
with Python's integers, and the two ends of every kind of copy against each other. Numbers are compared for
equality: there is no tolerance.

    pytest tests/reshard/test_digest.py"""

import random
import struct

import pytest
import torch

from megarl.reshard import digest as digest_module
from megarl.reshard.copier import copy_rects
from megarl.reshard.digest import Digest

MASK = 2**64 - 1
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int8)


@pytest.fixture(params=["extension", "pytorch"])
def executor(request, monkeypatch):
    if request.param == "pytorch":
        monkeypatch.setattr(digest_module, "extension_for", lambda device_type: None)
    return request.param


def mix(x):
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & MASK
    return x ^ (x >> 31)


def defined(values, version=None):
    """The digest of a matrix: full, or sampled with `version`."""
    rows, cols = values.shape
    seed = 0 if version is None else mix(version)
    size = values.element_size()
    raw = [bytes(values[row].contiguous().view(torch.uint8).tolist()) for row in range(rows)]
    words = [
        struct.unpack("<Q", row[at : at + 8].ljust(8, b"\0"))[0]
        for row in raw
        for at in range(0, cols * size, 8)
    ]
    chosen = range(len(words))
    if version is not None and len(words) > 16:
        bounds = [len(words) * part // 16 for part in range(17)]
        chosen = [
            a + (mix((seed + s * 0x9E3779B97F4A7C15) & MASK) >> 1) % (b - a)
            for s, (a, b) in enumerate(zip(bounds, bounds[1:]))
        ]
    total = 0
    for index in chosen:
        x = words[index] ^ (((index + 1) * 0x9E3779B97F4A7C15 + seed) & MASK)
        total += (x & 0xFFFFFFFF) * (x >> 32) + words[index]
    return mix((total + rows * 0xBF58476D1CE4E5B9 + cols * 0x94D049BB133111EB + size + seed) & MASK)


def matrix(rows, cols, dtype, seed=0):
    return (torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digests_are_as_defined(dtype, executor):
    views = [
        matrix(rows, cols + 3, dtype)[:, 2 : 2 + cols]
        for rows, cols in ((1, 1), (1, 65), (7, 1), (5, 8), (33, 37), (3, 2501), (40, 128))
    ]
    views += [matrix(6, 64, dtype), matrix(9, 5, dtype)]
    digest = Digest(views)
    assert digest.full() == [defined(view) for view in views]
    for version in (0, 1, 2**40):
        assert digest.sampled(version) == [defined(view, version) for view in views]


@pytest.mark.parametrize("dst_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("src_dtype", FLOATS, ids=str)
def test_both_ends_of_a_copy_agree(src_dtype, dst_dtype, executor):
    """From columns of one matrix into columns of another."""
    src, dst = matrix(48, 301, src_dtype), torch.zeros(64, 500, dtype=dst_dtype)
    sources = [src[3:40, 5:282], src[:, :7], src[0]]
    destinations = [
        dst[:37, 100:377],
        dst[2:50, 480:487],
        dst[60, :301],
    ]
    copy_rects(destinations, sources)
    sent, received = Digest(sources, dst_dtype), Digest(destinations)
    assert sent.full() == received.full() == [defined(s.to(dst_dtype).view(-1, s.shape[-1])) for s in sources]
    assert sent.sampled(7) == received.sampled(7)
    assert sent.sampled(7) != sent.sampled(8)


def test_threads_do_not_change_the_digest():
    views = [
        matrix(700, 2501, torch.bfloat16)[:, 1:2400],
        matrix(300, 1024, torch.float32),
        matrix(1, 9, torch.float32),
    ]
    expected = Digest(views).full()
    assert all(Digest(views, num_threads=n).full() == expected for n in (2, 3, 7))
    many = list(matrix(4000, 80, torch.float32))  # enough for three threads
    assert Digest(many, num_threads=3).sampled(4) == Digest(many).sampled(4)
    assert Digest(views, torch.float16).full() == Digest(views, torch.float16, num_threads=5).full()


def test_any_changed_element_is_found(executor):
    """Each bit of an element in each place of a small matrix; swapped elements and rows; signs of two
    elements."""
    values = matrix(4, 9, torch.bfloat16)
    before = Digest([values]).full()
    bits = values.view(torch.int16)
    changes = [(row, col, bit) for row in range(4) for col in range(9) for bit in (0, 7, 15)]
    for row, col, bit in changes:
        kept = bits.clone()
        bits[row, col] ^= torch.tensor(1 << bit if bit < 15 else -(1 << 15), dtype=torch.int16)
        assert Digest([values]).full() != before
        bits.copy_(kept)
    rng = random.Random(0)
    for _ in range(200):
        kept = values.clone()
        (a, b), (c, d) = [(rng.randrange(4), rng.randrange(9)) for _ in range(2)]
        if (a, b) != (c, d):
            for changed in (
                torch.stack([-values[a, b], -values[c, d]]),
                torch.stack([values[c, d], values[a, b]]),
            ):
                values[a, b], values[c, d] = changed[0].clone(), changed[1].clone()
                assert Digest([values]).full() != before
                values.copy_(kept)
    assert Digest([values]).full() == before
    assert Digest([values.view(9, 4)]).full() != before


def test_samples_see_every_stale_stretch(executor):
    """An eighth of the rows that was not copied is found by every version, wherever it begins; so is a change
    of all values by one unit."""
    old, new = matrix(64, 512, torch.bfloat16, seed=1), matrix(64, 512, torch.bfloat16, seed=2)
    for version in range(10):
        expected = Digest([new]).sampled(version)
        for row in range(0, 57, 3):
            stale = new.clone()
            stale[row : row + 8] = old[row : row + 8]
            assert Digest([stale]).sampled(version) != expected
        assert Digest([(new.view(torch.int16) + 1).view(torch.bfloat16)]).sampled(version) != expected


def test_digests_follow_the_values(executor):
    values = torch.zeros(100, 10)
    digest = Digest([values])
    before = digest.full(), digest.sampled(1)
    values[50:] = 1
    assert (digest.full(), digest.sampled(1)) == ([defined(values)], [defined(values, 1)])
    assert before[0] != digest.full() and before[1] != digest.sampled(1)


def test_nothing_to_digest(executor):
    assert Digest([]).full() == Digest([]).sampled(3) == []
    assert Digest([torch.empty(0, 4), torch.empty(4, 0)]).sampled(3) == [
        defined(torch.empty(0, 4), 3),
        defined(torch.empty(4, 0), 3),
    ]


WIDE = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("views", "dtypes", "message"),
    [
        ([WIDE], [torch.float32] * 2, r"dtypes \(2\) must be one per view \(1\)"),
        ([WIDE, WIDE.int()], torch.bfloat16, "view 1: torch.int32 to torch.bfloat16 is neither"),
        ([WIDE.t()], None, r"view 0 strides \[1, 6\] must end in 1"),
        ([WIDE[None]], None, r"view 0: a view must have 1 or 2 dimensions, not shape \[1, 4, 6\]"),
    ],
)
def test_bad_views_are_refused(views, dtypes, message):
    with pytest.raises(ValueError, match=message):
        Digest(views, dtypes)
    with pytest.raises(ValueError, match=r"num_threads \(0\) must be >= 1"):
        Digest([WIDE], num_threads=0)


def test_extension_checks_every_view():
    extension = pytest.importorskip("megarl._C")
    good, out = [64, 2, 3, 3, 4], torch.empty(2, dtype=torch.int64)
    for change, message in (
        ((0, 66), "aligned to its elements"),
        ((1, -1), ">= 0"),
        ((3, 2), "ld >= cols"),
        ((4, 3), r"mode \(3\) must be"),
    ):
        bad = list(good)
        bad[change[0]] = change[1]
        with pytest.raises(ValueError, match="view 1: .*" + message):
            extension.digest(torch.tensor([good, bad]), out, 0, True)
    with pytest.raises(ValueError, match="digests must have as many entries as views"):
        extension.digest(torch.tensor([good]), out, 0, True)
