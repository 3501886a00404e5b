"""Compile csrc/*.cu for each architecture, and fail if a kernel spills registers or uses a stack frame.

    python tools/check_cuda.py [--archs 80 90 100]

Needs nvcc (on PATH, in CUDA_HOME, or named in CUDACXX) but no GPU. Without nvcc the check counts as skipped,
with exit code 77."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "csrc"
SKIPPED = 77
PROPERTIES = re.compile(
    r"Function properties for (?P<kernel>\S+)\s*\n\s*(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads\s*\nptxas info\s*: Used (?P<registers>\d+) registers"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--archs",
        nargs="+",
        default=["80", "90", "100"],
        metavar="SM",
        help="compute capabilities (default: 80 90 100)",
    )
    arguments = parser.parse_args()
    nvcc = find_nvcc()
    if nvcc is None:
        print("skipped: nvcc was not found. Put it on PATH, or name it in CUDACXX.")
        return SKIPPED
    bad = False
    for source in sorted(CSRC.glob("*.cu")):
        for arch in arguments.archs:
            for kernel in compile_kernels(nvcc, source, arch):
                verdict = "SPILLS" if kernel["stack"] or kernel["stores"] or kernel["loads"] else "ok"
                bad |= verdict != "ok"
                print(
                    f"sm_{arch} {source.name} {kernel['kernel']}: {kernel['registers']} registers, "
                    f"{kernel['stack']} bytes stack, "
                    f"{kernel['stores']} + {kernel['loads']} bytes spilled: {verdict}"
                )
    return int(bad)


def find_nvcc() -> str | None:
    cuda_home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return os.environ.get("CUDACXX") or shutil.which("nvcc") or shutil.which("nvcc", path=f"{cuda_home}/bin")


def compile_kernels(nvcc: str, source: Path, arch: str) -> list[dict[str, str | int]]:
    """Return one record per kernel of `source`, as ptxas reports it.

    Raises: RuntimeError if the source does not compile or ptxas reports nothing."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            nvcc,
            "-std=c++17",
            "-O3",
            "-cubin",
            f"-arch=sm_{arch}",
            "-Xptxas=-v",
            str(source),
            "-o",
            f"{folder}/kernels.cubin",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = parse(done.stdout + done.stderr)
    if done.returncode or not found:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return found


def parse(report: str) -> list[dict[str, str | int]]:
    """Parse the report of `ptxas -v`: one record per kernel."""
    return [
        {name: int(value) if value.isdigit() else value for name, value in match.groupdict().items()}
        for match in PROPERTIES.finditer(report)
    ]


if __name__ == "__main__":
    sys.exit(main())
