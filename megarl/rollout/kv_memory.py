"""Release the GPU memory of an in-process vLLM engine's KV cache, and take it back.

    kv_cache = KVCacheMemory(llm, llm.llm_engine.step)
    kv_cache.release()      # the memory belongs to the device: roles train
    kv_cache.restore()      # the engine can sample again

vLLM 0.32 offers `LLM.release_kv_cache_memory` (vllm/entrypoints/llm.py:861, vllm/v1/engine/core.py:1021) for
an engine in sleep mode that is paused. It gives back the physical memory and keeps the addresses, so CUDA
graphs stay valid. The weights stay where they are. `LLM.sleep(1)` would move them, and many of them are the
trainer's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import LLM

_MOST_STEPS = 16
"""Steps after which a paused engine must have nothing under way. vLLM has at most two batches under way."""


class KVCacheMemory:
    """The memory of one engine rank's KV cache.

    Args:
        llm: an engine in this process.
        step: takes one step of the engine, and does not count it among the steps that all ranks take."""

    def __init__(self, llm: LLM, step: Callable[[], object]) -> None:
        self._llm, self._step = llm, step
        self.is_resident = True
        """Whether the memory is on the device."""

    @property
    def num_bytes(self) -> int:
        """Size of the KV cache on this rank, on the device or not."""
        return sum(tensor.size for tensor in self._core.scheduler.kv_cache_config.kv_cache_tensors)

    def release(self) -> None:
        """Give the KV cache's memory back to the device. Unfinished requests stay, and will compute their
        prefixes anew.

        Does nothing if it is released. Raises: RuntimeError if vLLM refuses."""
        if not self.is_resident:
            return
        self._llm.sleep(level=0, mode="keep")
        self._end_steps()
        self._llm.release_kv_cache_memory()
        self.is_resident = False

    def restore(self) -> None:
        """Take the KV cache's memory back, without its content.

        A cache that was not released loses its content too. Otherwise the ranks of one engine, of which some
        had released theirs, would find different prefixes and schedule different batches.

        Raises: RuntimeError if the device has too little memory, or vLLM refuses."""
        if self.is_resident:
            is_done = self._llm.reset_prefix_cache(reset_running_requests=True)
        else:
            is_done = self.is_resident = self._llm.wake_up(tags=["kv_cache"])
        if not is_done:
            raise RuntimeError("vLLM did not restore the engine's KV cache")

    def _end_steps(self) -> None:
        """Let the paused engine end the batches under way and forget finished requests.

        vLLM's own process does so in its loop (vllm/v1/engine/core.py, run_busy_loop). An engine in this
        process takes no step after the last request has finished, and vLLM refuses to release beside it."""
        core = self._core
        for _ in range(_MOST_STEPS):
            if not core.scheduler.has_requests() and not core.batch_queue:
                return
            self._step()
        raise RuntimeError(f"vLLM still has steps under way after {_MOST_STEPS} steps of a paused engine")

    @property
    def _core(self):
        return self._llm.llm_engine.engine_core.engine_core
