"""A simulated GPU for the KV cache of vLLM's CPU worker: counts what is mapped, refuses what has no room, and
destroys what is released.

Real are vLLM's engine, scheduler and executor, and the bookkeeping of its allocator (CuMemAllocator).
Stand-ins are the two driver calls below the allocator and the worker's three methods above it, which exist on
GPUs only (vllm/v1/worker/gpu_worker.py: initialize_from_config, discard, wake_up)."""

from __future__ import annotations

from collections.abc import Callable

import torch


class OutOfMemory(RuntimeError):
    pass


class SimulatedGPU:
    """The memory of one GPU.

    Attributes:
        kv_cache_bytes: mapped bytes of the KV cache.
        other_bytes: returns what everything else holds now.
        refuses: raises in the driver call of this name ("map" or "unmap") if set."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity, self.kv_cache_bytes, self.refuses = capacity, 0, ""
        self.other_bytes: Callable[[], int] = lambda: 0
        self.log: list[str] = []
        self._tensors: list[torch.Tensor] = []

    def check(self) -> None:
        """Raise OutOfMemory if more is held than there is."""
        held = self.kv_cache_bytes + self.other_bytes()
        if self.capacity is not None and held > self.capacity:
            raise OutOfMemory(f"{held} bytes are held of {self.capacity}")

    def _map(self, device: int, size: int, address: int, handle: int) -> None:
        self.log.append("map")
        if self.refuses == "map":
            raise OutOfMemory("the driver refuses to map")
        self.kv_cache_bytes += size
        self.check()

    def _unmap(self, device: int, size: int, address: int, handle: int) -> None:
        self.log.append("unmap")
        if self.refuses == "unmap":
            raise RuntimeError("the driver refuses to unmap")
        self.kv_cache_bytes -= size
        for tensor in self._tensors:  # physical memory without its content
            tensor.fill_(-1e4)

    def install(self) -> None:
        """Put vLLM's CPU workers of this process on this GPU."""
        from vllm.device_allocator import cumem

        from megarl.rollout.worker import NamedCPUWorker

        # what CuMemAllocator calls of CUDA
        cumem.python_create_and_map, cumem.python_unmap_and_release = self._map, self._unmap
        torch.accelerator.synchronize = lambda device=None: None
        torch.accelerator.empty_cache = lambda: None
        gpu, start = self, NamedCPUWorker.initialize_from_config

        def initialize_from_config(worker, kv_cache_config) -> None:
            start(worker, kv_cache_config)
            worker.allocator = allocator = cumem.CuMemAllocator()
            allocator.current_tag = "kv_cache"
            gpu._tensors = [t for t in worker.model_runner.kv_caches if t.is_floating_point()]
            gpu.kv_cache_bytes = 0
            for number, tensor in enumerate(kv_cache_config.kv_cache_tensors):
                allocation = (0, tensor.size, number, number)
                gpu._map(*allocation)
                allocator._python_malloc_callback(allocation)

        NamedCPUWorker.initialize_from_config = initialize_from_config
        NamedCPUWorker.discard = lambda worker, tags: worker.allocator.discard(tags)
        NamedCPUWorker.wake_up = lambda worker, tags=None: worker.allocator.wake_up(tags)
