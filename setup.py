"""Builds the extension megarl._C with CMake and installs triton_kernels/ as megarl.kernels. Everything else
is in pyproject.toml.

Environment: MEGARL_CUDA=AUTO|ON|OFF (AUTO: nvcc and something that could use the result), MEGARL_CUDA_ARCHS
(CMake's list), MAX_JOBS. Without a C++ compiler the package installs without the extension, and weights are
then copied by PyTorch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def find_nvcc() -> str | None:
    cuda_home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    of_wheels = os.pathsep.join(map(str, Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin")))
    on_paths = (shutil.which("nvcc", path=path) for path in (None, f"{cuda_home}/bin", of_wheels))
    return os.environ.get("CUDACXX") or next(filter(None, on_paths), None)


def torch_has_cuda() -> bool:
    """Whether the PyTorch next to this Python is a CUDA build. Read, not imported: pip's isolated builds hide
    it."""
    version = Path(sysconfig.get_path("purelib"), "torch", "version.py")
    lines = version.read_text().splitlines() if version.exists() else []
    return any(line.startswith("cuda") and not line.rstrip().endswith("None") for line in lines)


def cuda_choice() -> tuple[str | None, str]:
    """(nvcc, why CUDA is built) or (None, why not)."""
    wish = os.environ.get("MEGARL_CUDA", "AUTO").upper()
    if wish not in ("AUTO", "ON", "OFF"):
        raise ValueError(f"MEGARL_CUDA ({wish}) must be AUTO, ON or OFF. Leave it out for AUTO.")
    if wish == "OFF":
        return None, "MEGARL_CUDA=OFF"
    nvcc = find_nvcc()
    if wish == "ON":
        if nvcc is None:
            raise ValueError(
                "MEGARL_CUDA=ON needs nvcc: put it on PATH, name it in CUDACXX, or use MEGARL_CUDA=AUTO."
            )
        return nvcc, "MEGARL_CUDA=ON"
    if nvcc is None:
        return None, "nvcc was not found"
    if Path("/proc/driver/nvidia/version").exists():
        return nvcc, "nvcc and an NVIDIA driver were found"
    if torch_has_cuda():
        return nvcc, "nvcc and a CUDA build of PyTorch were found"
    return (
        None,
        "nvcc was found, but neither an NVIDIA driver nor a CUDA build of PyTorch (MEGARL_CUDA=ON "
        "builds it anyway)",
    )


class CMakeBuild(build_ext):
    """One CMake project, one module. A machine that cannot configure it installs without; code that does not
    compile is an error."""

    def build_extension(self, ext: Extension) -> None:
        nvcc, reason = cuda_choice()
        configured = self.configure(ext, nvcc, reason)
        if not configured and nvcc and os.environ.get("MEGARL_CUDA", "AUTO").upper() == "ON":
            raise RuntimeError(
                "MEGARL_CUDA=ON, but CMake could not set up the CUDA build: see its messages above."
            )
        if not configured and nvcc:
            nvcc, reason = None, f"{nvcc} does not work here"
            configured = self.configure(ext, nvcc, reason)
        if not configured:
            missing = "no working CMake, C++ compiler or Python headers (messages above)"
            self.warn(f"megarl._C is NOT built, weights are copied by PyTorch: {missing}")
            return
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        subprocess.run(["cmake", "--build", self.build_temp, "--parallel", jobs], check=True)
        self.warn(f"megarl._C is built {build_info(nvcc, reason)}")

    def configure(self, ext: Extension, nvcc: str | None, reason: str) -> bool:
        command = ["cmake", "--fresh", "-S", str(ROOT), "-B", self.build_temp, "-DCMAKE_BUILD_TYPE=Release"]
        command += [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DMEGARL_BUILD_INFO={build_info(nvcc, reason)}",
        ]
        command += [
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={Path(self.get_ext_fullpath(ext.name)).resolve().parent}"
        ]
        if shutil.which("ninja"):
            command += ["-G", "Ninja"]
        if nvcc:
            command += ["-DMEGARL_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}"]
        if nvcc and os.environ.get("MEGARL_CUDA_ARCHS"):
            command += [f"-DMEGARL_CUDA_ARCHS={os.environ['MEGARL_CUDA_ARCHS']}"]
        try:
            return subprocess.run(command, check=False).returncode == 0
        except FileNotFoundError:
            return False


def build_info(nvcc: str | None, reason: str) -> str:
    return f"with CUDA: {reason}" if nvcc else f"for the CPU only: {reason}"


setup(
    packages=[*find_packages(include=["megarl", "megarl.*"]), "megarl.kernels"],
    # vLLM takes any top-level `triton_kernels` for OpenAI's package of that name, so ours is never importable
    # under it.
    package_dir={"megarl.kernels": "triton_kernels"},
    ext_modules=[Extension("megarl._C", sources=[], optional=True)],
    cmdclass={"build_ext": CMakeBuild},
)
