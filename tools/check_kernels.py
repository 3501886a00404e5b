"""Compile every Triton kernel ahead of time, without a GPU, and fail on register spills and too much shared
memory.

    python tools/check_kernels.py [--capabilities 80 90 100] [--only gae] [--json out.json] [--triton-path
    DIR]

AOT_CASES of each megarl.kernels.*_triton lists the kernels to compile. The table has, per kernel and compute
capability, registers per thread, bytes of spill stores and loads, bytes of shared memory per block, the
numbers of tensor-core (mma.sync, wgmma, tcgen05) and bulk-copy (cp.async.bulk.tensor) instructions, and the
occupancy: the percentage of a multiprocessor's warps that can be resident, and what limits it. An integer
that may overflow at the shape of `megarl.kernels.aot` fails too. `tools/kernel_table.py` writes the table
into the documentation.

--triton-path names a folder with another Triton, made with `pip install --no-deps --target DIR
triton==3.6.0`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import io
import json
import logging
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parent))  # also with `python -P`
from kernel_ir import Work, analyse

MAX_SHARED_BYTES = {80: 166912, 90: 232448, 100: 232448}
"""Compute capability -> largest dynamic shared memory of a block."""
SM_SHARED_BYTES = {80: 167936, 90: 233472, 100: 233472}
"""Compute capability -> shared memory of a multiprocessor. Each block takes 1 KB of it for the system."""
SM_REGISTERS, SM_WARPS, SM_BLOCKS = 65536, 64, 32
"""Largest numbers on a multiprocessor, the same for sm_80, sm_90 and sm_100 (CUDA programming guide, table of
compute capabilities)."""
TENSOR_CORE = re.compile(r"^\s*(?:@\S+ )?(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", re.MULTILINE)
BULK_COPY = re.compile(r"\bcp\.async\.bulk\.tensor\b")
COLUMNS = {
    "registers": "registers",
    "spill_store_bytes": "spill stores",
    "spill_load_bytes": "spill loads",
    "shared_bytes": "shared",
    "tensor_core": "tensor cores",
    "bulk_copy": "bulk copies",
    "occupancy": "occupancy %",
}
logger = logging.getLogger("check_kernels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    kernel: str
    capability: int
    registers: int = 0
    """Registers per thread."""
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    """Bytes per thread, as ptxas counts them."""
    shared_bytes: int = 0
    """Bytes per block."""
    tensor_core: int = 0
    bulk_copy: int = 0
    """Numbers of instructions in the PTX."""
    occupancy: int = 0
    """Percentage of a multiprocessor's warps that can be resident."""
    limited_by: str = ""
    """What a multiprocessor runs out of first: registers, shared memory, blocks or warps."""
    element: str = ""
    """What `work` is counted by."""
    work: Work | None = None
    """Bytes and operations of one element."""
    problem: str | None = None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--capabilities",
        type=int,
        nargs="+",
        choices=sorted(MAX_SHARED_BYTES),
        default=sorted(MAX_SHARED_BYTES),
    )
    parser.add_argument("--only", help="part of the names of the cases to compile")
    parser.add_argument(
        "--files",
        type=Path,
        nargs="+",
        help="Python files with AOT_CASES, instead of those of megarl.kernels",
    )
    parser.add_argument("--jobs", type=int, default=min(2, len(os.sched_getaffinity(0))), help="processes")
    parser.add_argument("--json", type=Path, help="file to write the table to")
    parser.add_argument("--triton-path", type=Path, help="folder of another Triton")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if arguments.triton_path:
        if not (arguments.triton_path / "triton" / "__init__.py").is_file():
            parser.error(
                f"--triton-path ({arguments.triton_path}): holds no triton/. "
                f"Make it: pip install --no-deps --target {arguments.triton_path} triton==3.6.0"
            )
        sys.path.insert(0, str(arguments.triton_path.resolve()))
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.10 changes the default
    import triton

    cases = cases_of(arguments.files, arguments.only)
    pairs = [
        (case, capability)
        for case in cases
        for capability in arguments.capabilities
        if capability in case.capabilities
    ]
    if not pairs:
        parser.error(f"nothing to compile: --only ({arguments.only}) must be part of a name in an AOT_CASES")
    logger.info("Triton %s, %s", triton.__version__, Path(triton.__file__).parent)
    reports = compile_pairs(pairs, arguments.jobs)
    print_table(reports)
    if arguments.json:
        table = {"triton": triton.__version__, "kernels": [dataclasses.asdict(report) for report in reports]}
        arguments.json.write_text(json.dumps(table, indent=1) + "\n")
    problems = [report for report in reports if report.problem]
    for report in problems:
        logger.error("%s, sm_%d: %s", report.kernel, report.capability, report.problem)
    logger.info("%d of %d compilations are as they should be", len(reports) - len(problems), len(reports))
    return 1 if problems else 0


def cases_of(files: list[Path] | None, only: str | None) -> list:
    """Return the cases whose name has `only` in it."""
    return [case for module in modules(files) for case in module.AOT_CASES if (only or "") in name_of(case)]


def compile_pairs(pairs: list, jobs: int) -> list[Report]:
    """Compile each (case, capability) and return the reports in their order."""
    # Workers are forked, so that they have the modules already. This process compiles nothing.
    with ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("fork"), initializer=_share, initargs=(pairs,)
    ) as pool:
        return list(pool.map(_compile, range(len(pairs))))


def modules(files: list[Path] | None) -> list[ModuleType]:
    """Return the modules that may have AOT_CASES."""
    if files is None:
        import megarl.kernels

        names = [
            info.name
            for info in pkgutil.iter_modules(megarl.kernels.__path__)
            if info.name.endswith("_triton")
        ]
        return [importlib.import_module(f"megarl.kernels.{name}") for name in names]
    found = []
    for file in files:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        found.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(found[-1])
    return found


def name_of(case) -> str:
    """Return the kernel's name with what distinguishes its cases."""
    if case.variant:
        return f"{case.kernel.__name__.strip('_').removesuffix('_kernel')} {case.variant}"
    constants = " ".join(
        value if isinstance(value, str) else f"{key}={value}" for key, value in case.constants.items()
    )
    return f"{case.kernel.__name__.strip('_').removesuffix('_kernel')} {constants}".strip()


_pairs: list = []


def _share(pairs: list) -> None:
    _pairs[:] = pairs


def _compile(index: int) -> Report:
    """Compile one case for one capability and check the result. Runs in a worker."""
    case, capability = _pairs[index]
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Triton prints the whole PTX that ptxas refuses
            compiled = compile_case(case, capability)
    except Exception as error:  # noqa: BLE001 - Triton may raise anything, and the other cases must run
        return Report(
            kernel=name_of(case),
            capability=capability,
            problem=f"does not compile: {type(error).__name__}: {str(error)[:500]}",
        )
    counts = registers_and_spills(compiled.asm["ptx"])
    percent, limited_by = occupancy(capability, counts["registers"], compiled.metadata.shared, case.num_warps)
    report = Report(
        kernel=name_of(case),
        capability=capability,
        shared_bytes=compiled.metadata.shared,
        tensor_core=len(TENSOR_CORE.findall(compiled.asm["ptx"])),
        bulk_copy=len(BULK_COPY.findall(compiled.asm["ptx"])),
        occupancy=percent,
        limited_by=limited_by,
        element=case.element,
        **counts,
    )
    report, problems = _analyse(case, report, compiled.asm["ttir"])
    if report.spill_store_bytes or report.spill_load_bytes:
        problems.append(
            f"spills: {report.spill_store_bytes} B stored and {report.spill_load_bytes} B loaded "
            "per thread must be 0: "
            f"use a smaller block or more warps (num_warps is {case.num_warps})"
        )
    if report.shared_bytes > MAX_SHARED_BYTES[capability]:
        problems.append(
            f"shared memory ({report.shared_bytes} B) must be at most "
            f"{MAX_SHARED_BYTES[capability]} B: use a smaller block or "
            f"fewer stages (num_stages is {case.num_stages})"
        )
    missing = [
        instruction
        for instruction in case.must_use.get(capability, ())
        if instruction not in compiled.asm["ptx"]
    ]
    if missing:
        problems.append(f"does not use {' and '.join(missing)}, which it is fast by")
    return dataclasses.replace(report, problem="; ".join(problems) or None)


def _analyse(case, report: Report, ir: str) -> tuple[Report, list[str]]:
    """Return the report with the work of an element, and what is wrong with the kernel's integers. Only
    cases that say how many elements they compute have a cost."""
    from megarl.kernels.aot import ARGUMENTS

    analysis = analyse(ir, ARGUMENTS)
    num_elements = case.num_elements or case.constants.get("BLOCK")
    if num_elements:
        total = dataclasses.asdict(analysis.work)
        work = Work(**{name: round(value / num_elements, 2) for name, value in total.items()})
        if case.bytes_per_element is not None:
            work.bytes = round(case.bytes_per_element, 4)
        report = dataclasses.replace(report, work=work)
    problems = [
        f"{text}: multiply in int64, at the shape of megarl.kernels.aot" for text in analysis.overflows
    ]
    return report, problems


def compile_case(case, capability: int):
    """Return Triton's compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    if set(case.signature) | set(case.constants) != set(names):
        odd = sorted(set(names) ^ (set(case.signature) | set(case.constants)))
        raise ValueError(
            "signature and constants must name each argument of the kernel and no other: look at "
            f"{', '.join(odd)}"
        )
    signature = {name: "constexpr" if name in case.constants else case.signature[name] for name in names}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]] for name in case.aligned if name not in case.constants
    }
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=dict(case.constants), attrs=aligned)
    options = dict(num_warps=case.num_warps, num_stages=case.num_stages)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def registers_and_spills(ptx: str) -> dict[str, int]:
    """Return registers and spills of a kernel from Triton's own ptxas.

    The kernel's attributes n_regs and n_spills need a driver."""
    import triton

    architecture = re.search(r"^\.target\s+(sm_\w+)", ptx, re.MULTILINE)[1]
    programs = sorted(
        (Path(triton.__file__).parent / "backends" / "nvidia" / "bin").glob("ptxas*"), reverse=True
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(ptx)
        # The newer of the two reads what the other refuses: Triton 3.9 writes PTX 9.4 for sm_90 and later.
        for program in programs:
            command = [program, "-v", f"-arch={architecture}", "kernel.ptx", "-o", "/dev/null"]
            text = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stderr
            spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
            if spills:
                registers = re.search(r"Used (\d+) registers", text)[1]
                return dict(
                    registers=int(registers),
                    spill_store_bytes=int(spills[1]),
                    spill_load_bytes=int(spills[2]),
                )
    raise RuntimeError(
        f"none of {[p.name for p in programs]} assembles the kernel for {architecture}: {text[-500:]}"
    )


def occupancy(capability: int, registers: int, shared_bytes: int, num_warps: int) -> tuple[int, str]:
    """Return the percentage of a multiprocessor's warps that can be resident, and what limits it.

    Registers are given to a warp in units of 256, to 4 warps at a time. Shared memory is given in units of
    128 bytes."""
    registers_of_warp = -(-registers * 32 // 256) * 256
    of_block = -(-(shared_bytes + 1024) // 128) * 128
    blocks = {
        "warps": SM_WARPS // num_warps,
        "blocks": SM_BLOCKS,
        "registers": SM_REGISTERS // max(registers_of_warp, 1) // 4 * 4 // num_warps,
        "shared memory": SM_SHARED_BYTES[capability] // of_block,
    }
    limit = min(blocks, key=blocks.__getitem__)
    return 100 * blocks[limit] * num_warps // SM_WARPS, limit


def print_table(reports: list[Report]) -> None:
    width = max(len(report.kernel) for report in reports)
    row = "%-*s %6s %9s %12s %12s %8s %12s %11s %11s %s"
    logger.info(row, width, "kernel", "sm", *COLUMNS.values(), "limited by")
    for report in reports:
        values = [getattr(report, name) for name in COLUMNS]
        logger.info(row, width, report.kernel, report.capability, *values, report.limited_by)


if __name__ == "__main__":
    sys.exit(main())
