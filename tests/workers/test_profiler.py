"""The profiler of a rank: its ranges agree with the measured seconds, and nothing is made while it is off.

PyTorch's profiler runs for real. NVTX and the CUDA profiler's start and stop are recorded by stand-ins, as a
CPU has neither. A whole job is profiled in tests/e2e/test_ppo_job.py.

pytest tests/workers/test_profiler.py"""

from __future__ import annotations

import gzip
import json
import time
import types
from pathlib import Path

import pytest
import setuptools  # noqa: F401  before a test imports pip: Megatron-Core wants this distutils
import torch

from megarl import ranges
from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.ranges import call_ranges, profile_range, profiled
from megarl.runtime.inline_executor import InlineExecutor
from megarl.trainer.executors import interfaces_of
from megarl.trainer.profiled_steps import ProfiledSteps
from megarl.workers.profiler import ProfilerRole


class Worker:
    """Stands for an actor: its update has two micro-batches and an optimizer step."""

    def update(self, kl_coef: float = 0.0) -> dict[str, float]:
        for _ in range(2):
            with profile_range("micro_batch/forward"):
                time.sleep(0.02)
        self.step()
        return {}

    @profiled("optimizer/step")
    def step(self) -> None:
        torch.ones(256, 256) @ torch.ones(256, 256)

    def log_probs(self) -> dict[str, float]:
        time.sleep(0.02)
        return {}

    def worst_tokens(self, count: int) -> list[dict[str, int | float]]:
        return []


@pytest.fixture(autouse=True)
def nothing_records():
    yield
    ranges.record_with(None)


@pytest.fixture
def loop(tmp_path):
    """loop("torch", "--profile-step-start 1 ...", first_step) runs steps of two actors up to 4, and returns
    (notes for the user, seconds by (role, method) of each step)."""

    def run(kind: str, flags: str, first: int = 1) -> tuple[list[str], dict[int, dict]]:
        needed = f"--algorithm grpo --model m --train-data d --save {tmp_path}/run --train-iters 4"
        config = load_config([*needed.split(), "--profile", kind, *flags.split()], REGISTRY)
        names = ("actor", "actor_2")
        roles = {name: Worker() for name in names} | {"profiler": ProfilerRole(kind, 0, names)}
        executor = InlineExecutor(roles, interfaces_of(roles))
        notes: list[str] = []
        progress = types.SimpleNamespace(note=notes.append)
        steps = ProfiledSteps(
            config, executor, types.SimpleNamespace(progress=progress, folder=config.run.save)
        )
        seconds = {}
        for step in range(first, 5):
            executor.label = f"step {step}"
            steps.begin(step)
            executor.take_seconds()
            for name in names:
                executor.call(name, "log_probs").result()
                executor.call(name, "update", 0.1).result()
            executor.call("actor", "worst_tokens", 3).result()
            seconds[step] = executor.take_seconds()
            steps.end(step)
        steps.stop()
        return notes, seconds

    return run


def annotations(trace: Path) -> list[dict]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event for event in events if event.get("cat") == "user_annotation"]


def inside(inner: dict, outer: dict) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_ranges_of_a_trace_last_as_long_as_the_driver_says(loop, tmp_path):
    """Within 2 % in one of the two steps: the kernel may take the processor away between the readings of the two
    clocks, for milliseconds."""
    notes, seconds = loop("torch", "--profile-step-start 1 --profile-step-end 3")
    trace, table = sorted((tmp_path / "run" / "profile").iterdir(), reverse=True)
    assert (trace.name, table.name) == ("steps_2-3_rank_0.trace.json.gz", "steps_2-3_rank_0.kernels.txt")
    assert notes == [f"profile of rank 0: {trace}", f"profile of rank 0: {table}"]
    found = annotations(trace)
    steps = {event["name"]: event for event in found if event["name"].startswith("step ")}
    assert sorted(steps) == ["step 2", "step 3"]
    metrics = {("actor", "update"): "time/update_s", ("actor_2", "update"): "time_2/update_s"}
    metrics |= {("actor", "log_probs"): "time/log_probs_s", ("actor_2", "log_probs"): "time_2/log_probs_s"}
    apart = {metric: [] for metric in metrics.values()}
    for step, number in (("step 2", 2), ("step 3", 3)):
        within = [event for event in found if inside(event, steps[step])]
        for (role, method), metric in metrics.items():
            (one,) = [event for event in within if event["name"] == metric]
            (call,) = [event for event in within if event["name"] == f"{role}.{method}"]
            apart[metric].append(abs(one["dur"] / 1e6 / seconds[number][role, method] - 1))
            assert inside(one, call)
        assert len([event for event in within if event["name"] == "time/other_s"]) == 1
        updates = [event for event in within if event["name"].endswith("/update_s")]
        for name, count in (("micro_batch/forward", 2), ("optimizer/step", 1)):
            parts = [event for event in within if event["name"] == name]
            assert [sum(inside(part, update) for part in parts) for update in updates] == [count, count]
    assert {metric: min(both) for metric, both in apart.items() if min(both) > 0.02} == {}
    assert "aten::mm" in table.read_text() and "optimizer/step" in table.read_text()
    assert not any("profiler." in event["name"] for event in found)


def test_memory_of_operators_on_a_cpu(loop, tmp_path):
    loop("memory", "--profile-step-start 3 --profile-step-end 4")
    trace, table = sorted((tmp_path / "run" / "profile").iterdir(), reverse=True)
    assert (trace.name, table.name) == ("step_4_rank_0.trace.json.gz", "step_4_rank_0.memory.txt")
    (row,) = [line.split() for line in table.read_text().splitlines() if line.strip().startswith("aten::mm ")]
    assert "512.00" in row and "CPU Mem" in table.read_text()  # kB: 2 x 256 x 256 x 4 bytes
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event["name"] == "[memory]" for event in events)


def test_memory_history_on_a_gpu(loop, tmp_path, monkeypatch):
    """A stand-in writes the snapshot, which PyTorch can only make with CUDA."""
    recorded = []
    memory = torch.cuda.memory
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: recorded.append(options))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot"))
    notes, _ = loop("memory", "--profile-step-start 0 --profile-step-end 1")
    snapshot = tmp_path / "run" / "profile" / "step_1_rank_0.memory.pickle"
    assert notes == [f"profile of rank 0: {snapshot}"] and snapshot.read_bytes() == b"snapshot"
    assert recorded == [{"max_entries": 1_000_000}, {"enabled": None}]


@pytest.fixture
def nvtx(monkeypatch) -> list[str]:
    """Stand-ins for NVTX and for the capture range; what was called, in its order."""
    told: list[str] = []
    module = torch.cuda.nvtx
    monkeypatch.setattr(module, "range_push", lambda name: told.append(f"+{name}"))
    monkeypatch.setattr(module, "range_pop", lambda: told.append("-"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: told.append("capture"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: told.append("end of capture"))
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    return told


def test_nvtx_ranges_and_the_capture_range(loop, nvtx, tmp_path):
    notes, _ = loop("nsys", "--profile-step-start 2 --profile-step-end 3")
    update = "+micro_batch/forward - +micro_batch/forward - +optimizer/step -".split()
    per_actor = [
        [f"+{role}.log_probs", f"+{time}/log_probs_s", "-", "-", f"+{role}.update", f"+{time}/update_s"]
        + [*update, "-", "-"]
        for role, time in (("actor", "time"), ("actor_2", "time_2"))
    ]
    other = ["+actor.worst_tokens", "+time/other_s", "-", "-"]
    assert nvtx == [
        *("+warm-up", "-", "capture", "+step 3"),
        *per_actor[0],
        *per_actor[1],
        *other,
        *("-", "end of capture"),
    ]
    assert notes == [] and not (tmp_path / "run").exists()  # nsys writes the report


def test_without_nsys_the_user_is_told(loop, nvtx, monkeypatch):
    for name in ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"):
        monkeypatch.delenv(name, raising=False)
    (note,), _ = loop("nsys", "--profile-step-start 2 --profile-step-end 3")
    assert note.startswith("[rank 0] --profile nsys: this rank does not seem to run under `nsys profile`")
    assert "tools/nsys_train.sh" in note


def test_megatrons_own_ranges_are_shown_while_the_steps_are_captured(loop, nvtx, monkeypatch):
    from megarl.megatron.cpu_shim import cpu_megatron

    with cpu_megatron():
        from megatron.core import utils
    seen = []
    monkeypatch.setattr(Worker, "step", lambda self: seen.append(utils._nvtx_enabled))
    loop("nsys", "--profile-step-start 2 --profile-step-end 3")
    assert seen == [False, False, False, False, True, True, False, False]


@pytest.mark.parametrize(
    "first, files, told",
    [
        (3, ["step_3_rank_0.kernels.txt", "step_3_rank_0.trace.json.gz"], []),
        (4, [], ["--profile-step-end (3): the job goes on at step 4, so nothing is profiled."]),
    ],
)
def test_a_resumed_job_profiles_what_is_left(loop, tmp_path, first, files, told):
    notes, _ = loop("torch", "--profile-step-start 1 --profile-step-end 3", first=first)
    assert sorted(path.name for path in tmp_path.glob("run/profile/*")) == files
    assert [note for note in notes if note.startswith("--")] == told


def test_a_job_that_ends_early_keeps_its_profile(loop, tmp_path):
    loop("torch", "--profile-step-start 2 --profile-step-end 9")
    assert (tmp_path / "run" / "profile" / "steps_3-4_rank_0.trace.json.gz").exists()


def test_a_profile_that_cannot_be_written_ends_no_training(loop, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("a file")
    (note,), seconds = loop("torch", "--profile-step-start 0 --profile-step-end 1")
    assert note.startswith("the profile of rank 0 is lost: ") and "cannot be written" in note
    assert len(seconds) == 4


def test_nothing_is_made_while_no_profiler_records():
    assert not ranges.is_recording()
    assert profile_range("a") is profile_range("b") is call_ranges("actor", "update", "step 1")
    assert profiled("a")(len)("four") == 4
