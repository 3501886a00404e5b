"""Write the table of the Triton kernels into docs/kernels.md, without a GPU.

    python tools/kernel_table.py                    compile every kernel and write the table
    python tools/kernel_table.py --check            fail if the committed table is another
    python tools/kernel_table.py --check --only kl  only the rows of some kernels

Per kernel: bytes and operations of one element, counted in the kernel's IR (`kernel_ir.py`); what they are
bound by on an A100, an H100 and a B200, and the time that it takes at least; registers, spills, shared memory
and occupancy from `check_kernels.py`. Floors are arithmetic on peak numbers: nothing has run on a GPU."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import astuple, dataclass
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # also with `python -P`
from check_kernels import Report, cases_of, compile_pairs
from kernel_ir import Work

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "kernels.md"
BEGIN, END = "<!-- kernel table: written by tools/kernel_table.py -->", "<!-- end of the kernel table -->"


@dataclass(frozen=True, kw_only=True)
class GPU:
    """Peak numbers of a GPU: bytes and operations per second, without sparsity."""

    name: str
    capability: int
    memory: float
    fp32: float
    fp64: float
    tensor: float
    """bf16 with fp32 accumulation."""
    special: float
    """16 per clock and multiprocessor, where fp32 has 64 (sm_80) or 128 (sm_90, sm_100) multiply-adds."""


def _gpu(name: str, capability: int, *peaks: float, special_rate: int) -> GPU:
    """Return a GPU of peaks in 1e12: memory, fp32, fp64, tensor. `special_rate`: fp32 operations per special
    function."""
    memory, fp32, fp64, tensor = (peak * 1e12 for peak in peaks)
    special = fp32 / special_rate
    return GPU(
        name=name,
        capability=capability,
        memory=memory,
        fp32=fp32,
        fp64=fp64,
        tensor=tensor,
        special=special,
    )


GPUS = (
    _gpu("A100", 80, 2.039, 19.5, 9.7, 312, special_rate=8),  # NVIDIA A100 data sheet, 80 GB SXM
    _gpu("H100", 90, 3.35, 67, 34, 989, special_rate=16),  # NVIDIA H100 data sheet, SXM
    # NVIDIA's data sheets of DGX B200 (memory: 64 TB/s of eight GPUs) and HGX B200.
    _gpu("B200", 100, 8, 75, 37, 2250, special_rate=16),
)
RESOURCES = ("memory", "fp32", "fp64", "tensor cores", "special functions")


def floor(work: Work, gpu: GPU) -> tuple[float, str]:
    """Return the least seconds of an element on a GPU, and the resource that takes them."""
    peaks = (gpu.memory, gpu.fp32, gpu.fp64, gpu.tensor, gpu.special)
    seconds = [amount / peak for amount, peak in zip(astuple(work), peaks, strict=True)]
    longest = max(seconds)
    return longest, RESOURCES[seconds.index(longest)]


def elements_per_token(element: str) -> float | None:
    """Return how many elements a token has, or None where that depends on the batch."""
    from megarl.kernels.aot import NUM_HIDDEN, VOCAB_SIZE

    return {"token": 1, "logit": VOCAB_SIZE, "hidden value": NUM_HIDDEN}.get(element)


def cost_row(reports: list[Report]) -> str:
    """Return a kernel's row of bytes, operations, bounds and floors."""
    per_token = elements_per_token(reports[0].element)
    bounds, floors = [], []
    for report in reports:
        gpu = next(gpu for gpu in GPUS if gpu.capability == report.capability)
        seconds, bound = floor(report.work, gpu)
        bounds.append(bound)
        milliseconds = seconds * (per_token or 0) * 1e9
        floors.append(f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}")
    bound = bounds[0] if len(set(bounds)) == 1 else " / ".join(bounds)
    floors = "-" if per_token is None else " / ".join(floors)
    amounts = " | ".join(f"{amount:g}" for amount in astuple(reports[0].work))
    return f"| {reports[0].kernel} | {reports[0].element} | {amounts} | {bound} | {floors} |"


def resource_row(reports: list[Report]) -> str:
    """Return a kernel's row of registers, spills, shared memory and occupancy."""
    cells = dict.fromkeys((gpu.capability for gpu in GPUS), "-")
    for r in reports:
        spills = r.spill_store_bytes + r.spill_load_bytes
        cells[r.capability] = f"{r.registers} / {spills} / {r.shared_bytes} / {r.occupancy}"
    return f"| {reports[0].kernel} | {' | '.join(cells.values())} |"


def table(reports: list[Report], triton_version: str) -> list[str]:
    """Return the lines of both tables."""
    kernels = [list(group) for _, group in groupby(reports, key=lambda report: report.kernel)]
    return [
        "| kernel | element | bytes | fp32 | fp64 | tensor cores | special | bound by | ms per 1M tokens: "
        + " / ".join(gpu.name for gpu in GPUS)
        + " |",
        "|---|---|---|---|---|---|---|---|---|",
        *map(cost_row, kernels),
        "",
        "Registers per thread / bytes of spills / bytes of shared memory / occupancy in percent, "
        f"Triton {triton_version}:",
        "",
        "| kernel | " + " | ".join(f"sm_{gpu.capability}" for gpu in GPUS) + " |",
        "|---|---|---|---|",
        *map(resource_row, kernels),
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare with the committed table")
    parser.add_argument("--only", help="with --check: part of the names of the kernels to compare")
    parser.add_argument("--jobs", type=int, default=min(2, len(os.sched_getaffinity(0))), help="processes")
    arguments = parser.parse_args(argv)
    if arguments.only and not arguments.check:
        parser.error(f"--only ({arguments.only}) needs --check: a part of the table is never written")
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as in check_kernels.py
    import triton

    pairs = [
        (case, gpu.capability)
        for case in cases_of(None, arguments.only)
        for gpu in GPUS
        if gpu.capability in case.capabilities
    ]
    if not pairs:
        parser.error(f"nothing to compare: --only ({arguments.only}) must be part of a kernel's name")
    reports = compile_pairs(pairs, arguments.jobs)
    problems = [f"{r.kernel}, sm_{r.capability}: {r.problem}" for r in reports if r.problem]
    if problems:
        print("\n".join(problems))
        return 1
    lines = table(reports, triton.__version__)
    before, committed, after = _split(DOCUMENT.read_text())
    if not arguments.check:
        DOCUMENT.write_text("\n".join([before + BEGIN, *lines, END + after]))
        return 0
    missing = sorted(set(lines) - set(committed))
    if not arguments.only:
        missing += sorted(set(committed) - set(lines))
    if missing:
        print(
            "docs/kernels.md differs from what this tool computes (python tools/kernel_table.py writes it):"
        )
        print("\n".join(missing))
    return 1 if missing else 0


def _split(text: str) -> tuple[str, list[str], str]:
    """Return what is before the table, its lines, and what is after it."""
    before, rest = text.split(BEGIN)
    inside, after = rest.split(END)
    return before, inside.strip("\n").split("\n"), after


if __name__ == "__main__":
    sys.exit(main())
