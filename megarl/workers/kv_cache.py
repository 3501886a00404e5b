"""Size the KV cache of an in-process engine on a GPU, and let the offload manager release and restore it."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist

from megarl.config.hf_config import ModelShape
from megarl.config.kv_cache import expandable_segments, free_gpu_memory_fraction, releases_kv_cache
from megarl.config.schema import TrainConfig
from megarl.reshard.atlas import Atlas
from megarl.rollout.gpu_memory import (
    cuda_graph_bytes,
    engine_activation_bytes,
    gpu_kv_cache_bytes,
    own_weight_elements,
)
from megarl.rollout.kv_cache import GPU_BLOCK_SIZE, sequence_bytes, useful_kv_cache_bytes
from megarl.workers.offload_manager import KV_CACHE, OffloadManager

logger = logging.getLogger(__name__)


class ReleasableEngine(Protocol):
    """Methods of an engine whose KV cache can leave its GPU."""

    def release_kv_cache(self) -> None: ...

    def restore_kv_cache(self) -> None: ...


class EngineKVCache:
    """The KV cache of an engine in the form of the offload manager's models: it has one part, `kv_cache`.

    Args:
        num_bytes: size of the KV cache on this rank."""

    def __init__(self, engine: ReleasableEngine, num_bytes: int) -> None:
        self._engine, self._num_bytes, self._is_resident = engine, num_bytes, True

    @property
    def is_resident(self) -> bool:
        """Whether the KV cache is on the device."""
        return self._is_resident

    def offload(self, parts: Collection[str]) -> None:
        """Release the KV cache if it is among the parts and on the device."""
        if KV_CACHE in parts and self._is_resident:
            self._engine.release_kv_cache()
            self._is_resident = False

    def load(self, parts: Collection[str]) -> None:
        """Restore the KV cache if it is among the parts. The engine forgets earlier prefixes in any case."""
        if KV_CACHE in parts:
            self._engine.restore_kv_cache()
            self._is_resident = True

    def part_bytes(self, part: str) -> int:
        return self._num_bytes if part == KV_CACHE else 0

    def resident_bytes(self, part: str | None = None) -> int:
        return self._num_bytes if self._is_resident and part in (None, KV_CACHE) else 0

    def unallocated_bytes(self) -> int:
        return 0

    def take_copy_seconds(self) -> float:
        return 0.0


def releases_here(config: TrainConfig) -> bool:
    """Return whether the engine of this rank releases its KV cache while roles train."""
    return torch.cuda.is_available() and releases_kv_cache(config, dist.get_world_size())


def with_kv_cache_bytes(
    config: TrainConfig, shape: ModelShape, sources: Mapping[int, Atlas], offload_manager: OffloadManager
) -> TrainConfig:
    """Return the configuration with --rollout-kv-cache-memory-bytes set to a share of the GPU memory that
    will be free during rollouts, at most what a step's sequences can fill, the same on all ranks. Collective
    over the world.

    Returns the configuration as it is if another flag sets the size.

    Args:
        sources: rank -> sharding spec of the actor's weights on it.
    Raises: RuntimeError if a sequence of full length has no room."""
    for error in expandable_segments(os.environ):
        raise RuntimeError(error)
    fraction = free_gpu_memory_fraction(config, dist.get_world_size())
    if fraction is None:
        return config
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    rank, tp = dist.get_rank(), config.rollout.tensor_parallel_size
    itemsize = getattr(torch, config.engine_dtype).itemsize
    offered = sources.get(rank, {}) if shares_weights(config) else {}
    taken = (
        offload_manager.growth_until_rollout()
        + own_weight_elements(shape, tp, rank % tp, offered) * itemsize
        + engine_activation_bytes(config, shape, itemsize, total)
        + cuda_graph_bytes(config)
    )
    useful = useful_kv_cache_bytes(config, shape, dist.get_world_size() // tp, itemsize)
    size = torch.tensor(gpu_kv_cache_bytes(config, free - taken, fraction, useful))
    dist.all_reduce(size, op=dist.ReduceOp.MIN)
    num_bytes, one = int(size), _sequence_bytes(config, shape, itemsize)
    if num_bytes < one:
        raise RuntimeError(
            f"--rollout-free-gpu-memory-fraction ({fraction:g}): leaves {num_bytes / 1e9:.2f} GB of KV "
            f"cache, and one sequence of {config.sampling.max_engine_length} tokens needs {one / 1e9:.2f} GB. "
            "On "
            f"rank {rank} {free / 1e9:.2f} GB are free, and models and engine will take {taken / 1e9:.2f} GB "
            "of them. Try --offload gradients optimizer, or a larger --rollout-tensor-parallel-size."
        )
    if rank == 0:
        logger.info("KV cache of each engine rank: %.2f GB", num_bytes / 1e9)
    return replace(config, rollout=replace(config.rollout, kv_cache_memory_bytes=num_bytes))


def shares_weights(config: TrainConfig) -> bool:
    """Return whether an in-process engine uses the trainer's weights where their layouts agree."""
    return config.reshard.reshard_alias and config.engine_dtype == config.model.dtype


def _sequence_bytes(config: TrainConfig, shape: ModelShape, itemsize: int) -> int:
    block = config.rollout.block_size or GPU_BLOCK_SIZE
    tp = config.rollout.tensor_parallel_size
    return sequence_bytes(shape, tp, itemsize, config.sampling.max_engine_length, block)
