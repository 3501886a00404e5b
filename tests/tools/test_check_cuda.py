"""tools/check_cuda.py checks every kernel of a report, and names the architecture and nvcc when a compilation
fails. nvcc is a stand-in; a real one compiles in tests/reshard/test_cuda_kernels.py.

pytest tests/tools/test_check_cuda.py"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "check_cuda.py"
NVCC = """#!/bin/sh
# Knows sm_90 alone, and reports what the folder says.
case "$*" in
  --version) echo "Cuda compilation tools, release 12.4, V12.4.131" ;;
  *-arch=sm_90*) cat "$(dirname "$0")/report" >&2 ;;
  *) echo "nvcc fatal   : Unsupported gpu architecture" >&2; exit 1 ;;
esac
"""
ENTRY = "ptxas info    : Compiling entry function '{0}' for 'sm_90'\n"
PROPERTIES = """ptxas info    : Function properties for {0}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""


@pytest.fixture
def check(tmp_path):
    """Run the script for an architecture, where ptxas reports a text."""

    def run(arch: str, report: str) -> subprocess.CompletedProcess[str]:
        nvcc = tmp_path / "nvcc"
        nvcc.write_text(NVCC)
        nvcc.chmod(0o755)
        (tmp_path / "report").write_text(report)
        command = [sys.executable, "-P", SCRIPT, "--archs", arch]
        variables = os.environ | {"CUDACXX": str(nvcc)}
        return subprocess.run(command, capture_output=True, text=True, timeout=200, env=variables)

    return run


def test_kernels_whose_report_is_whole_pass(check):
    done = check("90", "".join((ENTRY + PROPERTIES).format(name) for name in ("f", "g")))
    assert done.returncode == 0, done.stderr
    assert "f: 32 registers" in done.stdout and "g: 32 registers" in done.stdout


def test_a_kernel_whose_report_has_another_form_fails(check):
    other = ENTRY.format("g") + "ptxas info    : 8 bytes spilled by g\n"
    done = check("90", (ENTRY + PROPERTIES).format("f") + other)
    assert done.returncode == 1 and "sm_90" in done.stderr
    assert "did not report all properties of g." in done.stderr
    assert "Traceback" not in done.stderr


def test_an_architecture_that_nvcc_does_not_know_is_named_with_its_version(check):
    done = check("100", "")
    assert done.returncode == 1 and "sm_100" in done.stderr
    assert "release 12.4" in done.stderr and "--list-gpu-code" in done.stderr
    assert "Traceback" not in done.stderr
