"""Prepare the start of an engine in processes of its own, watch them, and choose their visible devices."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from megarl.failures import ExplainedError
from megarl.rollout.engine_memory import remove_own_shared_memory, sweep_shared_memory
from megarl.rollout.environment import engine_environment, prepare_environment, undisturbed
from megarl.rollout.plugin import check_version, register
from megarl.runtime.process_tree import descendants

if TYPE_CHECKING:
    from vllm import LLM

T = TypeVar("T")

UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The executor that runs the model in the engine process itself.

Under its short name vLLM replaces it by "mp" on a CPU, to bind threads to cores. Several ranks on one machine
cannot use that."""


@contextlib.contextmanager
def starting_engine(ranks: Sequence[int], flag: str, errors: str | None = None) -> Iterator[type[LLM]]:
    """Yield the class LLM, in an environment in which it starts an engine in processes of its own.

    Args:
        ranks: ranks of the engine; `flag` is the flag of their number, for errors.
        errors: path of the engine's EngineErrors; None lets the engine print errors."""
    prepare_environment()
    check_version()  # EngineProcesses reads internals of the client
    sweep_shared_memory()
    with engine_environment(visible_devices(ranks, flag), errors), undisturbed():
        from vllm import LLM

        register()
        yield LLM


class EngineDied(ExplainedError, RuntimeError):
    """A process of vLLM ended unexpectedly."""

    read_on = "docs/debugging.md, section Read a failure"


class EngineHangs(EngineDied):
    """A process of an engine did not answer in time."""


class EngineProcesses:
    """Watches an engine's processes: if one ends unexpectedly, every call that waits for the engine fails.

    vLLM's own client would wait for ever."""

    def __init__(self, llm: LLM, describe: Callable[[int, str], str]) -> None:
        """Start a thread that watches the processes of `llm`.

        Args:
            describe: called with the pid and the kind of death; returns the error message."""
        self._client, self._describe, self._is_closing = llm.llm_engine.engine_core, describe, False
        self._processes = list(self._client.resources.engine_manager.processes)
        self.death: EngineDied | None = None
        """Error of the process that ended unexpectedly, if any."""
        threading.Thread(target=self._watch, name="watch_engine", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def have_died(self) -> bool:
        """Return whether a process ended unexpectedly; if so, `death` holds the error."""
        sentinels = [process.sentinel for process in self._processes]
        if (
            self.death is None
            and not self._is_closing
            and multiprocessing.connection.wait(sentinels, timeout=0)
        ):
            deadline = time.monotonic() + 1.0  # if two threads look at once, one finds the exit code later
            while not (dead := [process for process in self._processes if process.exitcode is not None]):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            self.death = EngineDied(
                self._describe(
                    dead[0].pid if dead else self.pids[0], how_it_ended(dead[0].exitcode if dead else None)
                )
            )
        return self.death is not None

    def call(self, function: Callable[[], T]) -> T:
        """Return the result of a call to vLLM, or raise an error if one of its processes has died.

        Raises: `death` if a process has died, because vLLM's own error for a dead engine names no cause."""
        try:
            if not self.have_died():
                return function()
        except Exception:
            if not self.have_died():
                raise
        raise self.death

    def kill(self) -> None:
        """End the engine's processes at once.

        Those that split the model are children of the engine's, and one that hangs would not notice its
        end."""
        self._is_closing = True
        children = [child for pid in self.pids for child in descendants(pid)]
        for process in self._processes:
            process.kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def shutdown(self) -> None:
        """End the engine's processes and remove the shared memory that they leave behind."""
        self._is_closing = True
        self._client.shutdown()
        remove_own_shared_memory()

    def _watch(self) -> None:
        multiprocessing.connection.wait([process.sentinel for process in self._processes])
        while not self._is_closing:
            if self.have_died():
                for future in list(self._client.utility_results.values()):
                    if not future.done():
                        future.set_exception(self.death)
                self._client.outputs_queue.put(self.death)
            time.sleep(0.2)


def how_it_ended(exit_code: int | None) -> str:
    """Return in words how a process ended, by its exit code; None stands for an unknown exit code."""
    if exit_code is None:
        return "exit code unknown"
    return f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"


def visible_devices(ranks: Sequence[int], flag: str) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for the engine of these ranks: their GPUs in the order of the ranks, then
    the node's other GPUs, whose memory is read too.

    Args:
        ranks: the engine's ranks; this process is one of them. `flag` is the flag of their number, for
            errors.
    Returns: None without GPUs.
    Raises: ValueError if the engine's ranks are not on one node."""
    if not torch.cuda.is_available():
        return None
    local_rank, rank = int(os.environ.get("LOCAL_RANK", "0")), dist.get_rank()
    first, on_node = rank - local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", len(ranks)))
    numbers = [rank - first for rank in ranks]
    if elsewhere := [rank for rank, number in zip(ranks, numbers, strict=True) if not 0 <= number < on_node]:
        raise ValueError(
            f"{flag} ({len(ranks)}): an out-of-process engine runs on one node. The engine of the ranks "
            f"{', '.join(map(str, ranks))} has rank {rank} on the node of the ranks {first} to "
            f"{first + on_node - 1}, and rank {elsewhere[0]} on another. Try {len(ranks) - len(elsewhere)}, "
            "or other ranks."
        )
    visible = os.environ.get(
        "CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))
    ).split(",")
    others = [number for number in range(len(visible)) if number not in numbers]
    return ",".join(visible[number] for number in [*numbers, *others])
