"""Build the emulated CUDA device, or find an earlier build, and run a command that has it.

    python tests/hostcuda/build.py python -c 'import torch; print(torch.ones(2, device="cuda"))'
    make test-hostcuda

megarl._C is built too, with its CUDA kernels as loops (tests/reshard/emulated_cuda/). A build takes a minute
and a half of one core. It is kept in build/hostcuda/, by a hash of the sources, PyTorch's version and the
compiler."""

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
sys.path.append(str(HERE.parents[1]))
from tests.reshard.emulated_cuda.sources import CSRC, HEADERS, host_sources  # noqa: E402

FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w", "-shared")


def build() -> Path:
    """Return the folder with the built libraries.

    Raises: RuntimeError without a compiler, or if the sources do not compile."""
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
        _compile(compiler, [SOURCES / "accelerator.cpp"], [], made / "libaccelerator.so")
        torch = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
        headers = [
            f"-I{path}"
            for path in (
                torch / "include",
                torch / "include/torch/csrc/api/include",
                sysconfig.get_path("include"),
            )
        ]
        libraries = [
            f"-L{torch / 'lib'}",
            f"-Wl,-rpath,{torch / 'lib'}",
            "-lc10",
            "-ltorch_cpu",
            "-ltorch_python",
        ]
        sources = [path for path in sorted(SOURCES.glob("*.cpp")) if path.name != "accelerator.cpp"]
        _compile(compiler, sources, headers + libraries, made / "_hostcuda.so")
        _compile(compiler, *_extension(Path(name)), made / "_C.so")
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
    told = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[0]
    parts = [version("torch"), sys.version, told, Path(__file__).read_text()]
    files = [path for folder in (SOURCES, CSRC, Path(HEADERS[0][2:])) for path in sorted(folder.glob("*.*"))]
    parts += [text for path in files for text in (path.name, path.read_text())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _extension(folder: Path) -> tuple[list[Path], list[str]]:
    """Return sources and options of megarl._C."""
    import nanobind

    own = Path(nanobind.__file__).parent
    options = [f"-I{own / part}" for part in ("include", "ext/robin_map/include")]
    options += [f"-I{sysconfig.get_path('include')}", *HEADERS, "-fvisibility=hidden", "-fno-strict-aliasing"]
    options += ["-DMEGARL_WITH_CUDA", '-DMEGARL_BUILD_INFO="for an emulated device"']
    return [CSRC / "bind.cpp", own / "src" / "nb_combined.cpp", *host_sources(folder)], options


def _compile(compiler: str, sources: list[Path], options: list[str], output: Path) -> None:
    done = subprocess.run(
        [compiler, *FLAGS, *map(str, sources), *options, "-o", str(output)], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the emulated device does not compile:\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    os.environ.update(environment())
    os.execvp(sys.argv[1], sys.argv[1:])
