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
import tomllib
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "device"
ROOT = HERE.parents[1]
CACHE = ROOT / "build" / "hostcuda"
sys.path.append(str(ROOT))
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


IMPORTED_BY_TRANSFORMER_ENGINE = ("onnxscript==0.7.2", "onnx==1.23.2", "onnx_ir==1.1.0", "ml_dtypes==0.6.0")


def transformer_engine() -> Path:
    """Return a folder with the Python code of the Transformer Engine that megarl uses; installs it first.

    Its extension is not there: it takes a quarter of an hour to compile, and cannot run here.

    Raises: RuntimeError if pip does not install the packages."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    name, _, number = requirements["te"][0].partition("==")
    packages = [f"{name.partition('[')[0]}=={number}", *IMPORTED_BY_TRANSFORMER_ENGINE]
    folder = CACHE / hashlib.sha256(" ".join(packages).encode()).hexdigest()[:16]
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as made:
            options = ["--quiet", "--no-deps", "--no-compile", "--target", f"{made}/built"]
            command = [sys.executable, "-m", "pip", "install", *options, *packages]
            done = subprocess.run(command, capture_output=True, text=True, timeout=200)
            if done.returncode:
                raise RuntimeError(f"{packages[0]} does not install: {done.stderr[-500:]}")
            try:
                Path(made, "built").rename(folder)
            except OSError:  # another process was faster
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
