"""Build the emulated CUDA device, or find an earlier build of the same sources. Prints the environment that uses it.

    python tests/hostcuda/build.py          prints HOSTCUDA=... and PYTHONPATH=...
    make test-hostcuda                      builds, and runs tests/hostcuda on the device

A build takes about a minute of one core. It is kept in build/hostcuda/, by a hash of the sources, PyTorch's version
and the compiler."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "device"
CACHE = HERE.parents[1] / "build" / "hostcuda"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w", "-shared")


def build() -> Path:
    """Return the folder with _hostcuda.so and libaccelerator.so. Raises: CalledProcessError; RuntimeError without a
    compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("no C++ compiler: install g++, or set CXX")
    folder = CACHE / _key(compiler)
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:  # another process may be building the same
        made = Path(name) / "built"
        made.mkdir()
        _compile(compiler, [SOURCES / "accelerator.cpp"], made / "libaccelerator.so")
        torch = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
        headers = [
            f"-I{path}" for path in (torch / "include", torch / "include/torch/csrc/api/include", _python_headers())
        ]
        libraries = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
        sources = [path for path in sorted(SOURCES.glob("*.cpp")) if path.name != "accelerator.cpp"]
        _compile(compiler, sources, made / "_hostcuda.so", *headers, *libraries)
        try:
            made.rename(folder)
        except OSError:  # the other one was faster
            assert folder.exists()
    return folder


def environment() -> dict[str, str]:
    """Return the environment variables of a process that has the device. Builds it if necessary."""
    paths = [str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"HOSTCUDA": str(build()), "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _key(compiler: str) -> str:
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    parts = [version("torch"), sys.version, told, *FLAGS]
    parts += [text for path in sorted(SOURCES.iterdir()) for text in (path.name, path.read_text())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _python_headers() -> str:
    return sysconfig.get_path("include")


def _compile(compiler: str, sources: list[Path], output: Path, *options: str) -> None:
    done = subprocess.run(
        [compiler, *FLAGS, *map(str, sources), *options, "-o", str(output)], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the emulated device does not compile:\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    for name, value in environment().items():
        print(f"{name}={value}")
