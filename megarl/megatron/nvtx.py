"""Turn on the NVTX ranges that Megatron-Core marks inside its layers."""

from __future__ import annotations

from megarl.megatron.cpu_shim import cpu_megatron


def show_megatron_ranges(shown: bool) -> None:
    """Let Megatron-Core mark its own ranges (attention, MLP, the phases of a pipeline), or stop it.

    Call this between two passes, because Megatron-Core checks that ranges end in reverse order."""
    with cpu_megatron():
        from megatron.core.utils import configure_nvtx_profiling

    configure_nvtx_profiling(shown)
