"""tools/kernel_table.py: the table in docs/kernels.md is the one that the tool computes.

pytest tests/kernels/test_kernel_table.py"""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.launch import run

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "kernels.md").read_text()


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import kernel_table

    return kernel_table


def check(tmp_path, *arguments):
    if f"Triton {version('triton')}:" not in PAGE:
        pytest.skip(f"the table is not of Triton {version('triton')}: registers differ")
    environment = {
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "MEGARL_KERNELS": None,
        "TRITON_INTERPRET": None,
    }
    script = ROOT / "tools" / "kernel_table.py"
    done = run("-P", script, "--check", *arguments, environment=environment, timeout=250)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.nightly
def test_the_committed_table_is_the_computed_one(tmp_path):
    assert check(tmp_path) == (0, "")


@pytest.mark.nightly
def test_rows_of_quick_kernels_are_the_computed_ones(tmp_path):
    assert check(tmp_path, "--only", "kl k3") == (0, "")


@pytest.mark.parametrize(
    "capability, work, seconds, bound",
    [
        (90, dict(bytes=2, fp32=7, special=1), 2 / 3.35e12, "memory"),
        (80, dict(bytes=1.1, fp32=7, tensor=8192, special=1), 8192 / 312e12, "tensor cores"),
        (100, dict(bytes=2, special=2), 2 / (75e12 / 16), "special functions"),
        (80, dict(bytes=0.004, fp64=8), 8 / 9.7e12, "fp64"),
    ],
)
def test_floor(tool, capability, work, seconds, bound):
    gpu = next(gpu for gpu in tool.GPUS if gpu.capability == capability)
    assert tool.floor(tool.Work(**work), gpu) == (pytest.approx(seconds), bound)


def test_the_table_has_the_bytes_that_the_ops_state():
    """The ops' own table, from their formulas, and the loads and stores in their IR."""
    stated = dict(re.findall(r"^\| `(\w+)`[^|]*\|[^|]*\|[^|]*\| (\d+) \|$", PAGE, re.M))
    counted = dict(re.findall(r"^\| (\w+)[^|]* \| token \| (\d+) \|", PAGE, re.M))
    names = {"kl_estimate": "kl"}
    assert len(stated) >= 4 and {names.get(op, op): n for op, n in stated.items()}.items() <= counted.items()
    assert int(counted["gae"]) == 17 and int(counted["whiten"]) == 9
    assert "| 17 + 9 |" in PAGE


def test_a_part_of_the_table_is_never_written():
    done = run("-P", ROOT / "tools" / "kernel_table.py", "--only", "kl", timeout=60)
    assert done.returncode == 2 and "--only (kl) needs --check" in done.stderr
