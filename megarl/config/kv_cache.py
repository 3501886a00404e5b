"""Decide whether engines release the GPU memory of their KV cache while roles train, and check the flags of
its size."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config.errors import Errors
from megarl.config.mesh import engine_mode
from megarl.config.rollout_backends import rollout_backend
from megarl.config.rules_layout import Job
from megarl.config.schema import TrainConfig

FREE_GPU_MEMORY_FRACTION = 0.9
"""Default of --rollout-free-gpu-memory-fraction."""
GPU_MEMORY_UTILIZATION = 0.5
"""Default of --rollout-gpu-memory-utilization for an engine that keeps its KV cache."""
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def releases_kv_cache(config: TrainConfig, world_size: int) -> bool:
    """Return whether, on GPUs, the engines of one actor release their KV cache while roles train."""
    wanted = config.algorithm.needs_rollout and config.rollout.release_kv_cache is not False
    return wanted and rollout_backend(config).has_blocks and engine_mode(config, world_size) == "in-process"


def free_gpu_memory_fraction(config: TrainConfig, world_size: int) -> float | None:
    """Return the share of the free GPU memory that the KV cache gets; None if another flag sets its size."""
    rollout = config.rollout
    is_sized = rollout.gpu_memory_utilization is not None or rollout.kv_cache_memory_bytes is not None
    if is_sized or not releases_kv_cache(config, world_size):
        return None
    return rollout.free_gpu_memory_fraction or FREE_GPU_MEMORY_FRACTION


def kv_cache(job: Job) -> Errors:
    """Yield an error if an engine that cannot release its KV cache is asked to, or two flags set its size."""
    rollout = job.config.rollout
    if rollout.release_kv_cache and not rollout_backend(job.config).has_blocks:
        yield (
            f"--rollout-release-kv-cache: vLLM alone can, and --rollout-backend is {rollout.backend}. "
            "Leave it out."
        )
    if job.engine == "out-of-process" and rollout.release_kv_cache:
        yield (
            "--rollout-release-kv-cache: an engine in processes of its own cannot know when the roles on its "
            "GPUs train, so it keeps its KV cache. Leave it out, or try --rollout-engine in-process."
        )
    if (fraction := rollout.free_gpu_memory_fraction) is None:
        return
    head = f"--rollout-free-gpu-memory-fraction ({fraction:g})"
    for flag in ("gpu-memory-utilization", "kv-cache-memory-bytes"):
        if getattr(rollout, flag.replace("-", "_")) is not None:
            yield f"{head}: --rollout-{flag} sets the size of the KV cache too. Leave one of them out."
    if job.engine == "out-of-process" or rollout.release_kv_cache is False:
        yield (
            f"{head}: sizes a KV cache that is released while roles train, and this engine keeps its own. "
            "Try --rollout-gpu-memory-utilization."
        )


def device_errors(config: TrainConfig, world_size: int, has_gpu: bool, environ: Mapping[str, str]) -> Errors:
    """Yield an error if the KV cache cannot be released on this kind of device or in this environment.

    Args:
        environ: environment variables of the ranks; {} if they are not known."""
    if not config.algorithm.needs_rollout:
        return
    if not has_gpu and config.rollout.release_kv_cache:
        yield (
            "--rollout-release-kv-cache: there is no GPU, and vLLM releases no KV cache on a CPU. Leave it "
            "out, or check a job for GPUs: megarl check --gpu-memory 80."
        )
    if has_gpu and releases_kv_cache(config, world_size):
        yield from expandable_segments(environ)
        policy = config.streaming.weight_update
        if config.streaming.staleness and policy != "recompute":
            yield (
                f"--weight-update ({policy}): the engines release their KV cache while roles train "
                "(--rollout-release-kv-cache), so unfinished responses must compute it anew. Try --weight-update "
                "recompute, or try --no-rollout-release-kv-cache."
            )


def expandable_segments(environ: Mapping[str, str]) -> Errors:
    """Yield an error if PyTorch's allocator is told to use expandable segments.

    vLLM 0.32 says of them that they "are incompatible with the memory pool used for sleep mode"
    (vllm/device_allocator/cumem.py:382). It switches them off around its own allocations only."""
    for name in _ALLOCATOR_VARIABLES:
        if value := environ.get(name):  # the first variable that is set counts, as in PyTorch
            options = [option.partition(":") for option in value.replace(" ", "").split(",")]
            if any(key == "expandable_segments" and on.lower() in ("true", "1") for key, _, on in options):
                yield (
                    f"{name} ({value}): vLLM says that expandable segments are incompatible with the memory "
                    "pool that releases the KV cache (pytorch/pytorch#147851). Leave expandable_segments "
                    "out, or try --no-rollout-release-kv-cache."
                )
            return
