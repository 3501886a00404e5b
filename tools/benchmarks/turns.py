"""Contenders for the same job take turns in one process: time, peak extra memory and error against float64
(bench_kernels.py)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LIMITS = {torch.float32: 2e-4, torch.bfloat16: 2**-7}
"""Largest error of megarl's results by their dtype: bf16's precision, and for fp32 four times what
log-probs from 4096 bf16 products have shown on an H100."""


@dataclass(frozen=True)
class Contender:
    name: str
    run: Callable[[], dict[str, Tensor]]
    """One run; returns what is compared with float64, by name. Nothing for a floor, which makes no result."""
    is_megarl: bool = False
    """Whether the case is void without a correct result of this contender."""


class Missing(Exception):
    """Raised by a contender that cannot take part here; says why."""


@dataclass(frozen=True)
class Case:
    title: str
    contenders: list[Contender]
    """The first one is what the times of the others are divided by."""
    float64: Callable[[], dict[str, Tensor]]


def compare(case: Case, repeats: int, limit_s: int) -> dict:
    """Run all contenders of a case in turns, `repeats` times each, and print a table.

    Returns: title; by contender's name either the reason why it is missing, or its seconds, extra bytes and
    errors; and problems, a line for each result of megarl that is missing or wrong.
    """
    print(f"\n{case.title}", flush=True)
    expected, results, running, problems = case.float64(), {}, [], []
    for contender in case.contenders:
        try:
            with time_limit(limit_s):
                contender.run()  # compiles, warms up
            memory, values = extra_memory(contender.run)
            results[contender.name] = {
                "extra_bytes": memory,
                "errors": errors(values, expected),
                "seconds": [],
            }
            running.append(contender)
            if contender.is_megarl:
                problems += wrong_results(contender.name, results[contender.name]["errors"], values)
        except Exception as error:  # another's software, on a device that it may not know: report, and go on
            results[contender.name] = {"missing": first_line(error)}
            if contender.is_megarl:
                problems.append(f"{contender.name}: {first_line(error)}")
        values = None
    del expected
    for _ in range(repeats):
        for contender in running:
            results[contender.name]["seconds"].append(seconds(contender.run))
    for contender in running:
        results[contender.name]["median_s"] = median(results[contender.name]["seconds"])
    first = results[case.contenders[0].name].get("median_s")
    for name, result in results.items():
        print(line(name, result, first), flush=True)
    return {"title": case.title, "results": results, "problems": problems}


def wrong_results(name: str, errors: dict[str, float], values: dict[str, Tensor]) -> list[str]:
    """Return a line for each error that is NaN or above the limit of the result's dtype."""
    limits = {key: LIMITS[value.dtype] for key, value in values.items()}
    return [
        f"{name}: the error of {key} is {error:.1e}; it must be at most {limits[key]:.1e}"
        for key, error in errors.items()
        if not error <= limits[key]
    ]


def line(name: str, result: dict, first_s: float | None) -> str:
    if "missing" in result:
        return f"  {name:26} missing: {result['missing']}"
    ratio = f"{result['median_s'] / first_s:6.2f}x" if first_s else "       "
    shown = "  ".join(f"{key} {value:.1e}" for key, value in result["errors"].items())
    return (
        f"  {name:26} {result['median_s'] * 1e3:10.3f} ms {ratio}  "
        f"+{result['extra_bytes'] / 2**20:8.1f} MiB  {shown}"
    )


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return (lines[0] if isinstance(error, Missing) else f"{type(error).__name__}: {lines[0]}")[:160]


@contextlib.contextmanager
def time_limit(limit_s: int) -> Iterator[None]:
    """TimeoutError in the main thread after `limit_s` seconds: a compiler may take minutes."""

    def stop(signum, frame):
        raise TimeoutError(f"its first run took more than {limit_s} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def seconds(run: Callable[[], object]) -> float:
    if not CUDA:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    flush = torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    flush.zero_()  # nobody finds their inputs in the L2 cache
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def extra_memory(run: Callable[[], dict[str, Tensor]]) -> tuple[int, dict[str, Tensor]]:
    """(bytes that a run needs beyond what is held before it, at its worst moment; what it returned)."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        values = run()
        return torch.cuda.max_memory_allocated() - before, values
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident now
    before = resident("VmRSS")
    values = run()
    return max(resident("VmHWM") - before, 0), values


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Of log-probs the largest difference, of everything else the relative Frobenius norm."""
    out = {}
    for name, value in actual.items():
        difference = value.double() - expected[name]
        out[name] = (
            difference.abs().max() if name == "log_probs" else difference.norm() / expected[name].norm()
        ).item()
    return out
