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
ENTRY = re.compile(r"Compiling entry function '([^']+)'")


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
            try:
                kernels = compile_kernels(nvcc, source, arch)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                return 1
            for kernel in kernels:
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

    Raises: RuntimeError if the source does not compile or the report lacks a kernel."""
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
    report = done.stdout + done.stderr
    found = parse(report)
    unread = {*ENTRY.findall(report)} - {kernel["kernel"] for kernel in found}
    if done.returncode:
        problem = (
            f"exited with {done.returncode}. `{nvcc} --list-gpu-code` prints the architectures that it "
            "knows: choose from them with --archs, or name another nvcc in CUDACXX."
        )
    elif unread or not found:
        problem = f"did not report all properties of {', '.join(sorted(unread)) or 'any kernel'}."
    else:
        return found
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    raise RuntimeError(
        f"{source.name} for sm_{arch}: {' '.join(command)} {problem}\n{version.strip()}\n{report}"
    )


def parse(report: str) -> list[dict[str, str | int]]:
    """Parse the report of `ptxas -v`: one record per kernel."""
    return [
        {name: int(value) if value.isdigit() else value for name, value in match.groupdict().items()}
        for match in PROPERTIES.finditer(report)
    ]


if __name__ == "__main__":
    sys.exit(main())
