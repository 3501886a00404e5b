"""tools/check_kernels.py: every kernel compiles for every GPU without spills, and one that spills does not
get through.

pytest tests/kernels/test_check_kernels.py"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.launch import run, succeed

ROOT = Path(__file__).resolve().parents[2]
BAD = """
import triton
import triton.language as tl
from megarl.kernels.aot import AotCase

@triton.jit
def softmax(x_ptr, y_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.arange(0, BLOCK), x / tl.sum(x))

@triton.jit
def matmul(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = i[:, None] * BLOCK + i[None, :]
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for step in range(8):
        total = tl.dot(tl.load(x_ptr + step * BLOCK * BLOCK + at), tl.load(x_ptr + (step + 8) * BLOCK * BLOCK + at), total)
    tl.store(y_ptr + at, total)

@triton.jit
def broken(x_ptr):
    tl.store(x_ptr, tl.no_such_function(1))

@triton.jit
def wide_row(x_ptr, row_stride):
    tl.store(x_ptr + tl.program_id(0) * row_stride + tl.arange(0, 64), 1.0)

@triton.jit
def wide_row_in_int64(x_ptr, row_stride):
    tl.store(x_ptr + tl.program_id(0).to(tl.int64) * row_stride + tl.arange(0, 64), 1.0)

TYPES = dict(x_ptr="*fp32", y_ptr="*fp32")
HALVES = dict(x_ptr="*bf16", y_ptr="*fp32")
AOT_CASES = [
    AotCase(kernel=softmax, signature=TYPES, constants=dict(BLOCK=4096)),
    AotCase(kernel=softmax, signature=TYPES, constants=dict(BLOCK=8192), num_warps=1),
    AotCase(kernel=softmax, signature=TYPES, constants=dict(BLOCK=64), must_use={90: ("wgmma.mma_async",)}),
    AotCase(kernel=matmul, signature=HALVES, constants=dict(BLOCK=64), must_use={90: ("wgmma.mma_async",)}),
    AotCase(kernel=matmul, signature=HALVES, constants=dict(BLOCK=128), num_warps=8, num_stages=6, aligned=("x_ptr",)),
    AotCase(kernel=matmul, signature=HALVES, constants=dict(BLOCK=256), num_warps=16),  # its wgmma has too few registers
    AotCase(kernel=wide_row, signature=dict(x_ptr="*fp32", row_stride="i32")),
    AotCase(kernel=wide_row_in_int64, signature=dict(x_ptr="*fp32", row_stride="i32")),
    AotCase(kernel=broken, signature=dict(x_ptr="*fp32")),
    AotCase(kernel=broken, signature=dict(y_ptr="*fp32")),
]
"""


REJECTED = """
from megarl.kernels.linear_log_probs_triton import CANDIDATES, aot_case_of

AOT_CASES = []
for tiles in CANDIDATES:
    others = tuple({80, 90, 100} - set(tiles.capabilities))
    AOT_CASES += [aot_case_of(tiles, True, others)] if others else []
"""


def check_kernels(tmp_path, *arguments):
    """(exit status, output, the table by kernel and capability)."""
    file = tmp_path / "out.json"
    script = ROOT / "tools" / "check_kernels.py"
    environment = {
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "MEGARL_KERNELS": None,
        "TRITON_INTERPRET": None,
    }
    done = run("-P", script, "--json", file, *arguments, environment=environment, timeout=250)
    rows = json.loads(file.read_text())["kernels"] if file.exists() else []
    return (
        done.returncode,
        done.stdout + done.stderr,
        {(row["kernel"], row["capability"]): row for row in rows},
    )


@pytest.mark.nightly
def test_every_kernel_of_ours_compiles_without_spills(tmp_path):
    returncode, output, rows = check_kernels(tmp_path)
    assert returncode == 0, output
    assert {name.split()[0] for name, _ in rows} >= {
        "gae",
        "policy_loss",
        "value_loss",
        "dpo_loss",
        "kl",
        "group_advantages",
    }
    assert {capability for _, capability in rows} == {80, 90, 100}
    assert all(
        row["registers"] > 0 and row["spill_store_bytes"] == row["spill_load_bytes"] == 0
        for row in rows.values()
    )


@pytest.mark.nightly
@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
def test_every_kernel_compiles_with_other_versions_of_triton(tmp_path, version):
    folders = os.environ.get("MEGARL_TRITON_PATHS", "").split(os.pathsep)
    found = [f for f in folders if f and Path(f, f"triton-{version}.dist-info").is_dir()]
    if not found:
        pytest.skip(
            f"MEGARL_TRITON_PATHS names no folder with Triton {version}: "
            f"pip install --no-deps --target DIR triton=={version}"
        )
    returncode, output, rows = check_kernels(tmp_path, "--triton-path", found[0])
    assert returncode == 0 and f"Triton {version}" in output, output
    assert all(row["registers"] > 0 for row in rows.values())


@pytest.mark.nightly
def test_tiles_that_are_never_tried_do_not_fit(tmp_path):
    """Each of them spills, needs too much shared memory, or misses its instructions."""
    file = tmp_path / "rejected.py"
    file.write_text(REJECTED)
    _, output, rows = check_kernels(tmp_path, "--files", file)
    assert len(rows) >= 6 and all(row["problem"] for row in rows.values()), output


@pytest.mark.parametrize(
    "capability, registers, shared_bytes, num_warps, expected",
    [
        (80, 32, 0, 4, (100, "warps")),
        (80, 64, 0, 8, (50, "registers")),  # 65536 / (64 x 32) = 32 warps
        (90, 65, 0, 4, (43, "registers")),  # 72 registers: 28 warps
        (90, 239, 151552, 8, (12, "registers")),  # 240 registers: 8 warps
        (80, 32, 100000, 4, (6, "shared memory")),
        (100, 32, 100000, 4, (12, "shared memory")),
        (90, 16, 0, 1, (50, "blocks")),
    ],
)
def test_occupancy(monkeypatch, capability, registers, shared_bytes, num_warps, expected):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import check_kernels as tool

    assert tool.occupancy(capability, registers, shared_bytes, num_warps) == expected


def test_every_file_with_a_kernel_lists_it():
    """A kernel that nobody lists is not checked."""
    # In a process of its own: here the interpreter's tests want these modules for themselves.
    script = (
        "import importlib, json, sys; print(json.dumps({m: [c.kernel.fn.__name__ for c in "
        "importlib.import_module('megarl.kernels.' + m)"
        ".AOT_CASES] for m in sys.argv[1:]}))"
    )
    paths = sorted((ROOT / "triton_kernels").glob("*_triton.py"))
    names = (path.stem for path in paths)
    done = succeed("-c", script, *names, environment={"TRITON_INTERPRET": None}, timeout=60)
    listed = {module: set(kernels) for module, kernels in json.loads(done.stdout).items()}
    for path in paths:
        kernels = set(re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.M))
        assert kernels == listed[path.stem], path.name


def test_spills_shared_memory_and_errors_are_found(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text(BAD)
    returncode, output, rows = check_kernels(tmp_path, "--files", file, "--capabilities", 90)
    assert returncode == 1
    assert (
        rows["softmax BLOCK=4096", 90]["problem"] is None and rows["matmul BLOCK=64", 90]["problem"] is None
    )
    assert rows["softmax BLOCK=4096", 90]["limited_by"] and rows["softmax BLOCK=4096", 90]["occupancy"] > 0
    assert rows["matmul BLOCK=64", 90]["tensor_core"] > 0 == rows["softmax BLOCK=4096", 90]["tensor_core"]
    spilling = rows["softmax BLOCK=8192", 90]
    assert spilling["spill_store_bytes"] > 0 and "use a smaller block or more warps" in spilling["problem"]
    assert "does not use wgmma.mma_async" in rows["softmax BLOCK=64", 90]["problem"]
    hoarding = rows["matmul BLOCK=128", 90]
    assert hoarding["shared_bytes"] > 232448 and "must be at most 232448 B" in hoarding["problem"]
    assert (
        "Insufficient registers" in rows["matmul BLOCK=256", 90]["problem"] and len(output) < 5000
    )  # Triton prints all of such PTX
    assert "broken, sm_90: does not compile" in output and "look at x_ptr, y_ptr" in output
    assert (
        "= arith.muli" in rows["wide_row", 90]["problem"] and "beyond i32" in rows["wide_row", 90]["problem"]
    )
    assert rows["wide_row_in_int64", 90]["problem"] is None
    # One pass through the loop and what follows: both factors in bf16, the fp32 product; 64 elements by BLOCK.
    assert rows["matmul BLOCK=64", 90]["work"]["tensor"] == 2 * 64**3 / 64
    assert rows["matmul BLOCK=64", 90]["work"]["bytes"] == (2 * 64**2 * 2 + 64**2 * 4) / 64
    softmax = dict(bytes=8, fp32=2, fp64=0, tensor=0, special=0)
    assert rows["softmax BLOCK=4096", 90]["work"] == softmax
    assert "3 of 10 compilations are as they should be" in output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--only", "no such kernel"], "nothing to compile: --only (no such kernel)"),
        (
            ["--triton-path", "."],
            "--triton-path (.): holds no triton/. Make it: pip install --no-deps --target",
        ),
    ],
)
def test_errors_say_what_to_do(tmp_path, arguments, message):
    returncode, output, _ = check_kernels(tmp_path, *arguments)
    assert returncode == 2 and message in output
