"""The CUDA kernels without a GPU: compiled for the CPU with emulated_cuda/, where every thread runs in turn,
and compared bit for bit with PyTorch and with the CPU's digests. What a thread does is tested, not what a GPU
makes of it; tests/gpu runs the same cases there.

    pytest tests/reshard/test_cuda_kernels.py"""

import ctypes
import re
import runpy
import shutil
import subprocess

import pytest
import torch

from megarl.reshard import copier
from megarl.reshard import digest as digest_module
from megarl.reshard.digest import Digest
from tests.launch import run
from tests.reshard.emulated_cuda.sources import CSRC, HEADERS, host_sources
from tests.reshard.cases import PAIRS, bits, rectangles

ENTRIES = """
#include "copy_plan.h"
#include "digest.h"
using namespace megarl;
extern "C" void copy(const Rect* rects, int64_t count) {
  const CopyPlan plan(rects, count);
  std::vector<TiledRect> table(plan.num_rects());
  std::vector<int32_t> rect_of_tile(plan.num_tiles());
  plan.fill_tables(table.data(), rect_of_tile.data());
  plan.run_cuda(table.data(), rect_of_tile.data(), nullptr);
}
extern "C" void digest(const View* views, int64_t count, uint64_t seed, bool sampled, uint64_t* digests) {
  std::vector<TiledView> table;
  std::vector<int32_t> view_of_tile;
  for (int64_t i = 0; i < count; ++i) {
    table.push_back({views[i], static_cast<int64_t>(view_of_tile.size())});
    view_of_tile.insert(view_of_tile.end(), num_tiles(views[i]), i);
  }
  sum_cuda(table.data(), view_of_tile.data(), count, view_of_tile.size(), seed, sampled, digests, nullptr);
  finish_sums(views, count, seed, digests);
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "entries.cpp").write_text(ENTRIES)
    sources = [folder / "entries.cpp", *host_sources(folder)]
    command = [
        compiler,
        "-std=c++17",
        "-O1",
        "-shared",
        "-fPIC",
        "-pthread",
        *HEADERS,
        *map(str, sources),
    ]
    command += ["-o", str(folder / "kernels.so")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "kernels.so"))


def array(rows, columns):
    return torch.tensor(rows, dtype=torch.int64).view(-1, columns)


@pytest.mark.parametrize(
    ("src_dtype", "dst_dtype"), PAIRS, ids=lambda dtype: str(dtype).removeprefix("torch.")
)
def test_copies_equal_pytorch(kernels, src_dtype, dst_dtype):
    dst, expected, views, sources = rectangles(src_dtype, dst_dtype, "cpu")
    rects = array(copier._rects(views, sources), 7)
    kernels.copy(ctypes.c_void_p(rects.data_ptr()), ctypes.c_int64(len(rects)))
    assert torch.equal(bits(dst), bits(expected))


@pytest.mark.parametrize(
    ("src_dtype", "dst_dtype"), PAIRS, ids=lambda dtype: str(dtype).removeprefix("torch.")
)
def test_digests_equal_the_cpu_s(kernels, src_dtype, dst_dtype):
    _, _, _, sources = rectangles(src_dtype, dst_dtype, "cpu")
    digest = Digest(sources, dst_dtype)
    rows = digest._table
    for sampled, seed, expected in (
        (False, 0, digest.full()),
        (True, digest_module._mix(5), digest.sampled(5)),
    ):
        out = torch.zeros(len(rows), dtype=torch.int64)
        seed, size = ctypes.c_uint64(seed), ctypes.c_int64(len(rows))
        kernels.digest(
            ctypes.c_void_p(rows.data_ptr()),
            size,
            seed,
            ctypes.c_bool(sampled),
            ctypes.c_void_p(out.data_ptr()),
        )
        assert [value & (2**64 - 1) for value in out.tolist()] == expected


REPORT = """ptxas info    : Compiling entry function 'f' for 'sm_90'
ptxas info    : Function properties for f
    24 bytes stack frame, 36 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 80 registers, used 0 barriers, 24 bytes cumulative stack size
"""


def test_no_kernel_spills():
    """On one architecture; tools/check_cuda.py without arguments tries all that are built."""
    check = runpy.run_path(str(CSRC.parent / "tools" / "check_cuda.py"))
    assert check["parse"](REPORT) == [
        {"kernel": "f", "stack": 24, "stores": 36, "loads": 12, "registers": 80}
    ]
    done = run(CSRC.parent / "tools" / "check_cuda.py", "--archs", "90", timeout=250)
    if done.returncode == check["SKIPPED"]:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^sm_90 \w+\.cu .*: ok$", done.stdout, re.MULTILINE)) == 3
