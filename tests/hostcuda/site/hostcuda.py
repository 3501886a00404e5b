"""Make PyTorch's CPU build find the emulated CUDA device.

torch.cuda's own Python code runs. What it misses in torch._C is supplied here: answers about devices,
streams, memory and random numbers, from the module _hostcuda (tests/hostcuda/device/). torch.distributed
finds a backend "nccl" (hostnccl.py).

    HOSTCUDA=folder          the built libraries; without it nothing happens
    HOSTCUDA_DEVICES=4       devices of this process (1)
    HOSTCUDA_MEMORY_MIB=80   memory of each (80 GiB)
    HOSTCUDA_RACES=0         do not report accesses that a stream has not waited for
    HOSTNCCL_TIMEOUT_S=60    how long a communicator waits for all its ranks"""

from __future__ import annotations

import ctypes
import enum
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path


def install_before_torch() -> None:
    """Arrange that `import torch` installs the device. Call this before torch is imported."""
    # PyTorch's own function of the same name, which finds no accelerator, is found after this one.
    ctypes.CDLL(str(Path(os.environ["HOSTCUDA"]) / "libaccelerator.so"), mode=ctypes.RTLD_GLOBAL)
    os.environ["TORCH_DISABLE_NATIVE_JIT"] = "1"  # PyTorch's own Triton kernels, which need a driver
    sys.meta_path.insert(0, _Hook())


class _Hook(importlib.abc.MetaPathFinder):
    """Installs each part of the device just before PyTorch's module that looks for it is imported."""

    def __init__(self) -> None:
        self._before = {
            "torch._C": _load_library,
            "torch.cuda": _supply_cuda,
            "torch.distributed.constants": _supply_nccl,
        }

    def find_spec(self, name, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        if install := self._before.pop(name, None):
            install()
        # the extension with its CUDA kernels as loops
        return _extension_spec(name, "_C.so") if name == "megarl._C" else None


def _supply_cuda() -> None:
    """Add to torch._C what a CUDA build has there."""
    import torch

    native = _load_native()
    c = torch._C
    c._has_cuda = True
    torch.version.cuda = "13.0"
    c._CudaStreamBase, c._CudaEventBase = _stream_classes(c, native)
    c._CudaDeviceProperties = DeviceProperties
    c._cudart, c._nvtx = _runtime(native), _nvtx()
    for module in (c._cudart, c._nvtx):
        sys.modules[module.__name__] = module
    c._cuda_init = lambda: _initialize(native)
    c._cuda_isInBadFork = _watch_forks(native)
    c._nccl_version, c._nccl_version_suffix = lambda: 2 << 32 | 29 << 16 | 7, lambda: b""
    c._cuda_getDeviceCount = native.device_count
    c._cuda_getDevice = native.current_device
    c._cuda_setDevice = lambda device: native.set_device(device) and None
    c._cuda_exchangeDevice = c._cuda_maybeExchangeDevice = native.set_device
    c._cuda_canDeviceAccessPeer = lambda device, peer: device != peer
    c._cuda_getArchFlags = lambda: "sm_90"
    c._cuda_getCompiledVersion = lambda: 13000
    c._cuda_synchronize = lambda: native.synchronize(-1)
    c._cuda_sleep = lambda cycles: native.sleep()
    c._cuda_ipc_collect = lambda: None
    c._cuda_isCurrentStreamCapturing = lambda: False
    c._CUDAGraph, c._graph_pool_handle = type("_CUDAGraph", (_NotEmulated,), {}), _NotEmulated
    c._cuda_getCurrentStream = lambda device: (native.current_stream(device), device, _CUDA)
    c._cuda_getDefaultStream = lambda device: (0, device, _CUDA)
    c._cuda_getCurrentRawStream = lambda device: native.raw_stream(device, native.current_stream(device))
    c._cuda_setStream = lambda stream_id, device_index, device_type: native.set_stream(
        device_index, stream_id
    )
    c._cuda_memoryStats = native.memory_stats
    c._cuda_resetPeakMemoryStats = native.reset_peaks
    c._cuda_resetAccumulatedMemoryStats = lambda device: None
    c._cuda_emptyCache = native.empty_cache
    c._cuda_getAllocatorBackend = lambda: "native"
    _supply_storages(torch, native)


_CUDA = 1
"""Number of the device type."""


def _extension_spec(name: str, file: str) -> importlib.machinery.ModuleSpec:
    path = str(Path(os.environ["HOSTCUDA"]) / file)
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    return importlib.util.spec_from_file_location(name, path, loader=loader)


def _load_library() -> None:
    """Register the device before torch._C asks for it: PyTorch keeps the first answer."""
    ctypes.CDLL(_extension_spec("_hostcuda", "_hostcuda.so").origin)


def _load_native() -> types.ModuleType:
    spec = _extension_spec("_hostcuda", "_hostcuda.so")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _stream_classes(c: types.ModuleType, native: types.ModuleType) -> tuple[type, type]:
    """Return the base classes of torch.cuda.Stream and torch.cuda.Event."""

    class CudaStreamBase(c.Stream):
        def __new__(cls, priority=0, stream_id=None, device_index=None, device_type=_CUDA, stream_ptr=None):
            import torch

            if stream_id is None:
                return super().__new__(cls, torch.device("cuda", native.current_device()), priority=priority)
            return super().__new__(
                cls, stream_id=stream_id, device_index=device_index, device_type=device_type
            )

        @property
        def cuda_stream(self) -> int:
            return native.raw_stream(self.device_index, self.stream_id)

        @property
        def _as_parameter_(self) -> ctypes.c_void_p:
            return ctypes.c_void_p(self.cuda_stream)

        @property
        def priority(self) -> int:
            return 0

    class CudaEventBase(c.Event):
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
            return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)

        def elapsed_time(self, end_event: CudaEventBase) -> float:
            return native.elapsed_ms(self, end_event)

    return CudaStreamBase, CudaEventBase


def _initialize(native: types.ModuleType) -> None:
    """Do what the first use of CUDA does in a process."""
    import torch

    if not native.device_count():
        raise RuntimeError("No CUDA GPUs are available")
    _watch_forks.initialized = True
    devices = range(native.device_count())
    torch.cuda.default_generators = tuple(map(native.default_generator, devices))
    properties = [
        DeviceProperties("hostcuda", f"GPU-hostcuda-{device}", native.total_memory(device), device)
        for device in devices
    ]
    torch.cuda._get_device_properties = properties.__getitem__
    _supply_mixed_products(torch)


def _watch_forks(native: types.ModuleType) -> Callable[[], bool]:
    """Return the function that says whether this process was forked by one that had used CUDA."""
    forked = []
    _watch_forks.initialized = False

    def in_child() -> None:
        if _watch_forks.initialized:
            forked.append(True)
            native.require_initialization()

    os.register_at_fork(after_in_child=in_child)
    return lambda: bool(forked)


def _runtime(native: types.ModuleType) -> types.ModuleType:
    """Return what torch.cuda.cudart() returns."""
    module = types.ModuleType("torch._C._cudart")

    class cudaError(enum.IntEnum):  # noqa: N801, the runtime's name
        success = 0

    def memory(device: int) -> tuple[int, int]:
        total = native.total_memory(device)
        return total - native.memory_stats(device)["reserved_bytes"]["all"]["current"], total

    module.cudaError, module.cudaMemGetInfo = cudaError, memory
    module.cudaGetErrorString = str
    module.cudaProfilerStart = module.cudaProfilerStop = lambda: cudaError.success
    module.cudaHostRegister = module.cudaHostUnregister = lambda *arguments: cudaError.success
    return module


def _nvtx() -> types.ModuleType:
    module = types.ModuleType("torch._C._nvtx")
    module.rangePushA = module.rangePop = module.markA = lambda *arguments: 0
    module.rangeStartA = module.rangeEnd = lambda *arguments: 0
    return module


def _supply_storages(torch: types.ModuleType, native: types.ModuleType) -> None:
    """Let storages change their size, and be opened by other processes."""
    storage_type = torch.UntypedStorage
    resize_on_cpu = storage_type.resize_

    def as_bytes(storage):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (0,), (1,))

    def resize_(self, size: int):
        if self.device.type != "cuda":
            return resize_on_cpu(self, size)
        native.resize_storage(as_bytes(self), size)
        return self

    def share(self, *arguments):
        file, offset, size = native.export_memory(as_bytes(self))
        handle = f"{os.getpid()}:{file}:{offset}".encode()
        return self.device.index, handle, size, 0, b"", 0, b"", False

    def open_shared(cls, device, handle, size, *arguments):
        torch.cuda._lazy_init()
        process, file, offset = map(int, handle.split(b":"))
        if process == os.getpid():
            raise RuntimeError("CUDA error: a process cannot open its own IPC handle")
        return native.import_memory(device, f"/proc/{process}/fd/{file}", offset, size).untyped_storage()

    storage_type.resize_ = resize_
    storage_type._share_cuda_ = share
    storage_type._new_shared_cuda = classmethod(open_shared)


def _supply_mixed_products(torch: types.ModuleType) -> None:
    """Add the matrix products with fp32 results of bf16 factors, which PyTorch has on CUDA only."""
    library = _supply_mixed_products.library = torch.library.Library("aten", "IMPL", "CUDA")

    def mm(self, mat2, out_dtype):
        assert self.dtype == mat2.dtype
        return torch.mm(self.to(out_dtype), mat2.to(out_dtype))

    def mm_out(self, mat2, out_dtype, *, out):
        assert out.dtype == out_dtype
        return out.copy_(mm(self, mat2, out_dtype))

    def addmm_out(self, mat1, mat2, out_dtype, *, beta=1, alpha=1, out):
        assert out.dtype == out_dtype and self.dtype in (out_dtype, mat1.dtype)
        return out.copy_(self.to(out_dtype) * beta + alpha * mm(mat1, mat2, out_dtype))

    library.impl("mm.dtype", mm)
    library.impl("mm.dtype_out", mm_out)
    library.impl("addmm.dtype_out", addmm_out)


class _NotEmulated:
    """Refuses what the emulated device lacks: CUDA graphs."""

    def __init__(self, *arguments, **options) -> None:
        raise NotImplementedError("hostcuda: CUDA graphs are not emulated")


def _supply_nccl() -> None:
    """Add the class ProcessGroupNCCL, which torch.distributed looks for."""
    import torch

    from hostnccl import ProcessGroupNCCL

    torch._C._distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL
    torch._C._distributed_c10d._DEFAULT_PG_NCCL_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class DeviceProperties:
    """What torch.cuda.get_device_properties returns. The numbers are an H100's."""

    name: str
    uuid: str
    total_memory: int
    pci_bus_id: int
    pci_device_id: int = 0
    pci_domain_id: int = 0
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    L2_cache_size: int = 50 << 20
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""
