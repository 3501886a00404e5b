"""Record what a rank does during some steps: with Nsight Systems, PyTorch's profiler or the allocator's
history.

A call of the driver has three ranges, one inside the other:

    step 11              the label of the calls, from the first call of the step on this rank
      actor.update       role and method
        time/update_s    the metric that the seconds of the call count in, which are measured just inside

Inside are the ranges of megarl/ranges.py (micro_batch/forward, ...)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

import torch

from megarl.files.writing import WriteError, writing
from megarl.flow.job_roles import Profiler
from megarl.flow.role import time_metric
from megarl.ranges import Range, record_with
from megarl.role_names import actor_suffix, with_suffix
from megarl.workers.implements import implements

_MEMORY_EVENTS = 1_000_000  # a million allocations are about 1 GB of host memory with their stacks
_TABLE_ROWS = 200
_NSYS_VARIABLES = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")
"""Variables that `nsys profile` sets in the environment of the processes that it starts."""


@implements(Profiler)
class ProfilerRole:
    """Starts and stops the profiler of one rank, and writes its files.

    Args:
        kind: value of --profile.
        roles: names of the job's roles."""

    def __init__(self, kind: Literal["nsys", "torch", "memory"], rank: int, roles: Collection[str]) -> None:
        self.rank, self._roles = rank, roles
        if kind == "nsys":
            self._profiler: _Nsys | _Torch | _MemoryHistory = _Nsys()
        elif kind == "memory" and torch.cuda.is_available():
            self._profiler = _MemoryHistory()
        else:
            self._profiler = _Torch(of_memory=kind == "memory")

    def start(self) -> list[str]:
        """Start the profiler of this rank, and return notes for the user."""
        self._recorder = CallRecorder(self._profiler, self._roles)
        with self._profiler.range("warm-up"):  # not recorded; the first range of a process takes milliseconds
            pass
        notes = [f"[rank {self.rank}] {note}" for note in self._profiler.start()]
        record_with(self._recorder)
        return notes

    def stop(self, folder: str, name: str) -> list[str]:
        """Stop the profiler, write the files of this rank, and return their paths, or why they were not
        written."""
        record_with(None)
        self._recorder.end_step()
        start_of_path = Path(folder) / f"{name}_rank_{self.rank}"
        try:
            with writing(start_of_path):
                return [f"profile of rank {self.rank}: {path}" for path in self._profiler.stop(start_of_path)]
        except WriteError as error:  # training does not depend on a profile
            return [f"the profile of rank {self.rank} is lost: {error}"]


class CallRecorder:
    """Marks the driver's calls on a rank as ranges of a profiler.

    Args:
        profiler: has `range(name)`, which returns a context manager.
        roles: names of the job's roles. An actor's number is in the metrics of its roles."""

    def __init__(self, profiler: _Nsys | _Torch | _MemoryHistory, roles: Collection[str]) -> None:
        self.range, self._roles = profiler.range, roles
        self._label: str | None = None
        self._step = contextlib.ExitStack()

    @contextlib.contextmanager
    def call(self, role: str, method: str, label: str | None) -> Iterator[None]:
        """Mark a call by the metric of its seconds and by its name, within the range of its label."""
        if role == Profiler.kind:  # starts or stops the recording itself
            yield
            return
        if label != self._label:
            self.end_step()
            self._label = label
            if label is not None:
                self._step.enter_context(self.range(label))
        metric = with_suffix(time_metric(role, method), actor_suffix(role, self._roles))
        with self.range(f"{role}.{method}"), self.range(metric):
            yield

    def end_step(self) -> None:
        """End the range of the current step."""
        self._step.close()
        self._label = None


class _Nsys:
    """Marks ranges by NVTX, and the profiled steps as the capture range of `nsys profile`, which writes the
    report."""

    def start(self) -> list[str]:
        from megarl.megatron.nvtx import show_megatron_ranges

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        torch.cuda.profiler.start()
        show_megatron_ranges(True)
        if any(os.environ.get(name) for name in _NSYS_VARIABLES):
            return []
        return [
            "--profile nsys: this rank does not seem to run under `nsys profile`, so there will be no report."
            " Start the job with tools/nsys_train.sh."
        ]

    def stop(self, path: Path) -> list[Path]:
        from megarl.megatron.nvtx import show_megatron_ranges

        show_megatron_ranges(False)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels of the last step belong to the report
        torch.cuda.profiler.stop()
        return []

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


class _Torch:
    """Records operators, kernels and ranges with PyTorch's profiler, or with `of_memory` also what operators
    allocate."""

    def __init__(self, of_memory: bool = False) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._of_memory = of_memory
        self._profile = torch.profiler.profile(
            activities=activities, profile_memory=of_memory, record_shapes=of_memory, acc_events=True
        )

    def start(self) -> list[str]:
        self._profile.start()
        return []

    def stop(self, path: Path) -> list[Path]:
        self._profile.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        trace = path.with_name(f"{path.name}.trace.json.gz")
        table = path.with_name(f"{path.name}.{'memory' if self._of_memory else 'kernels'}.txt")
        self._profile.export_chrome_trace(str(trace))
        table.write_text(self._table())
        return [trace, table]

    def _table(self) -> str:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        order = f"self_{device}_memory_usage" if self._of_memory else f"self_{device}_time_total"
        return self._profile.key_averages().table(
            sort_by=order, row_limit=_TABLE_ROWS, max_name_column_width=80
        )

    def range(self, name: str) -> Range:
        return torch.profiler.record_function(name)


class _MemoryHistory:
    """Records every allocation of PyTorch's CUDA allocator with its Python stack, for
    pytorch.org/memory_viz."""

    def start(self) -> list[str]:
        torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        return []

    def stop(self, path: Path) -> list[Path]:
        path.parent.mkdir(parents=True, exist_ok=True)
        snapshot = path.with_name(f"{path.name}.memory.pickle")
        torch.cuda.memory._dump_snapshot(str(snapshot))
        torch.cuda.memory._record_memory_history(enabled=None)
        return [snapshot]

    def range(self, name: str) -> Range:
        return contextlib.nullcontext()
