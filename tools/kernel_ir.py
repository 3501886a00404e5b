"""Read a kernel's Triton IR: what it costs per element, and whether its 32-bit integers can overflow.

Both walk the text of the IR from top to bottom and know, for each integer, the interval that its values lie
in at the shape of `megarl.kernels.aot`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

RESULT = re.compile(r"(?:%([\w.]+)(?::\d+)? = )?\"?([a-z_]+\.[a-z_0-9]+)\"?")
VALUE = re.compile(r"%[\w.#]+")
TENSOR = re.compile(r"tensor<((?:\d+x)*)([^<>]*(?:<[^<>]*>)?)>")
ARGUMENT = re.compile(r"%(\w+): ([^\s,){]+(?:<[^>]*>)?)")
FLOATING = {
    "arith.addf",
    "arith.subf",
    "arith.mulf",
    "arith.divf",
    "arith.negf",
    "arith.maximumf",
    "arith.minimumf",
    "arith.maxnumf",
    "arith.minnumf",
    "math.fma",
}
SPECIAL = {"math.exp", "math.exp2", "math.log", "math.log2", "math.sqrt", "math.rsqrt", "tt.precise_sqrt"}
"""Functions of the special-function units. A division by one number of all elements is a product with its
reciprocal, which ptxas computes once."""
PASSED_ON = {
    "tt.splat",
    "tt.broadcast",
    "tt.expand_dims",
    "tt.trans",
    "tt.reshape",
    "arith.extsi",
    "arith.extui",
    "arith.trunci",
}
LARGEST_PROGRAM = {"x": 32_767, "y": 37, "z": 0}
"""A row of 32k tokens, and a block of 4096 columns of a vocabulary of 152k."""
LARGEST_LOADED = 2**31 - 1
"""A loaded integer is a token id or the position of a token."""
Interval = tuple[int, int]


@dataclass
class Work:
    """Bytes and operations of one pass through a kernel's code, or of one element."""

    bytes: float = 0
    """Loaded and stored."""
    fp32: float = 0
    fp64: float = 0
    """Floating-point operations outside of the tensor cores; a fused multiply-add counts 2."""
    tensor: float = 0
    """Number of floating-point operations that tensor cores do (`tl.dot`), a multiply-add counted as two."""
    special: float = 0
    """Exponentials, logarithms and roots."""


@dataclass
class Analysis:
    work: Work = field(default_factory=Work)
    overflows: list[str] = field(default_factory=list)
    """Integer operations whose result may not fit their type, for people."""


def analyse(ir: str, arguments: Mapping[str, int]) -> Analysis:
    """Return the cost and the possible overflows of a kernel.

    Args:
        ir: Triton IR (`compiled.asm["ttir"]`).
        arguments: largest value of each integer argument, by name. Unknown ones count as 32-bit integers of
            any value."""
    reader = _Reader(arguments)
    for line in ir.splitlines():
        line = re.sub(r" ?loc\([^()]*(?:\([^()]*\))?\)", "", line)
        if not line.startswith("#"):
            reader.read(line.strip())
    return Analysis(reader.work, reader.overflows)


class _Reader:
    def __init__(self, arguments: Mapping[str, int]):
        self.arguments = arguments
        self.work, self.overflows = Work(), []
        self.values: dict[str, Interval] = {}
        self.loops: list[int] = []
        """Trips of the loops around the line, and 0 for each other region."""
        self.region: list[str] | None = None
        """Operations of the function that a reduction or a scan combines with, while within it."""

    def read(self, line: str) -> None:
        match = RESULT.match(line)
        name, operation = (match[1], match[2]) if match else (None, "")
        if line.startswith("tt.func"):
            self._read_arguments(line)
        elif self.region is not None and not line.startswith("})"):
            self.region.append(operation)
        elif operation in ("tt.reduce", "tt.scan"):
            self.region = []
        elif line.startswith("})"):
            self._count_combinations(line)
        elif operation == "scf.for":
            self._enter_loop(line)
        elif line.startswith("}"):
            if self.loops:
                self.loops.pop()
            if line.endswith("{"):  # } else {
                self.loops.append(0)
        elif line.endswith("{") and not line.startswith("module"):
            self.loops.append(0)
        elif operation:
            self._count(operation, line)
            if name and operation not in ("scf.yield",):
                self._evaluate(name, operation, line)

    def _read_arguments(self, line: str) -> None:
        for name, kind in ARGUMENT.findall(line):
            if re.fullmatch(r"i\d+", kind):
                self.values["%" + name] = (0, self.arguments.get(name, _limits(kind)[1]))
        self.loops.append(0)

    def _enter_loop(self, line: str) -> None:
        """Give the loop's variable its interval and count the trips of a loop within a loop."""
        variable, first, end, step = re.search(r"for (%\S+) = (%\S+) to (%\S+) step (%\S+)", line).groups()
        low, high, by = self._interval(first), self._interval(end), self._interval(step)
        bits = line.rsplit(":", 1)[1].strip(" {")
        self._check(f"the last step of {variable}", bits, (low[0], high[1] + by[1]))
        self.values[variable] = (low[0], max(high[1] - 1, low[0]))
        is_inner = any(self.loops)
        self.loops.append(max(-(-(high[1] - low[0]) // max(by[1], 1)), 1) if is_inner else 1)

    @property
    def _repeats(self) -> int:
        """How often the line is run per pass: the trips of loops within a loop."""
        repeats = 1
        for trips in self.loops:
            repeats *= trips or 1
        return repeats

    def _count_combinations(self, line: str) -> None:
        """Count one combination per element of what is reduced or scanned."""
        size, kind = _tensors(line)[0]
        self._add(sum(operation in FLOATING for operation in self.region) * size, kind)
        self.region = None

    def _count(self, operation: str, line: str) -> None:
        if operation == "tt.dot":
            (size, _), (columns, _), *_, (result, _) = _tensors(line)
            depth = round((size * columns / result) ** 0.5)
            self.work.tensor += 2 * result * depth * self._repeats
            return
        if operation in ("tt.load", "tt.store", "tt.descriptor_load", "tt.descriptor_store"):
            self._count_bytes(line)
        if " : tensor<" not in line or operation not in FLOATING | SPECIAL:
            return
        size, kind = _tensors(line)[-1]
        if operation in SPECIAL:
            self.work.special += size * self._repeats
        else:
            self._add(size, kind)

    def _count_bytes(self, line: str) -> None:
        tensors = _tensors(line)
        if tensors:
            size, kind = tensors[-1] if "descriptor" in line else tensors[0]
            self.work.bytes += size * _bits(kind) / 8 * self._repeats

    def _add(self, operations: int, kind: str) -> None:
        if kind == "f64":
            self.work.fp64 += operations * self._repeats
        elif kind == "f32":
            self.work.fp32 += operations * self._repeats

    def _interval(self, value: str) -> Interval:
        if value not in self.values:
            raise ValueError(f"the interval of {value} is not known")
        return self.values[value]

    def _evaluate(self, name: str, operation: str, line: str) -> None:
        """Note the interval of an integer result, and an overflow."""
        kind = line.rsplit(" : ", 1)[-1].rsplit(" to ", 1)[-1].rsplit("-> ", 1)[-1]
        kind = (_tensors(kind) or [(1, kind.strip())])[-1][1]
        if operation == "tt.load":
            kind = kind.removeprefix("!tt.ptr<").removesuffix(">")
        if not re.fullmatch(r"i\d+", kind):
            return
        names = VALUE.findall(line.split("=", 1)[1].split(" : ", 1)[0])
        operands = [self.values.get(value) for value in names]
        result = _result(operation, line, operands)
        if operation == "tt.load":
            result = (0, min(LARGEST_LOADED, _limits(kind)[1]))
        if result is None:
            result = _limits(kind)
        else:
            self._check(f"%{name} = {operation} {', '.join(names)}", kind, result)
        self.values["%" + name] = result

    def _check(self, what: str, kind: str, interval: Interval) -> None:
        low, high = _limits(kind)
        if kind != "i1" and (interval[0] < low or interval[1] > high):
            self.overflows.append(f"{what} may be {interval[0]} to {interval[1]}, beyond {kind}")


def _result(operation: str, line: str, operands: list[Interval | None]) -> Interval | None:
    """Return the interval of an operation's exact result, or None where it is not known."""
    if operation == "arith.constant":
        number = re.search(r"constant (?:dense<)?(-?\d+)", line)
        return (int(number[1]),) * 2 if number else (0, 1)
    if operation == "tt.make_range":
        return 0, int(re.search(r"end = (\d+)", line)[1]) - 1
    if operation == "tt.get_program_id":
        return 0, LARGEST_PROGRAM[re.search(r"program_id (\w)", line)[1]]
    if operation == "tt.get_num_programs":
        return 1, LARGEST_PROGRAM[re.search(r"num_programs (\w)", line)[1]] + 1
    if not operands or any(operand is None for operand in operands):
        return None
    (low, high), *others = operands
    if operation in PASSED_ON:
        return low, high
    if operation == "arith.select" and len(others) == 2:
        return min(others[0][0], others[1][0]), max(others[0][1], others[1][1])
    if len(others) != 1:
        return None
    other_low, other_high = others[0]
    products = [a * b for a in (low, high) for b in (other_low, other_high)]
    return {
        "arith.addi": (low + other_low, high + other_high),
        "arith.subi": (low - other_high, high - other_low),
        "arith.muli": (min(products), max(products)),
        "arith.divsi": (min(low, 0), max(high, 0))
        if other_low < 1
        else (low // other_high, high // other_low),
        "arith.remsi": (0, max(min(high, other_high - 1), 0)) if low >= 0 else None,
        "arith.minsi": (min(low, other_low), min(high, other_high)),
        "arith.maxsi": (max(low, other_low), max(high, other_high)),
    }.get(operation)


def _limits(kind: str) -> Interval:
    bits = int(kind[1:])
    return (0, 1) if bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _tensors(text: str) -> list[tuple[int, str]]:
    """Return (number of elements, type of an element) of each tensor type in a line."""
    found = []
    for sizes, kind in TENSOR.findall(text):
        size = 1
        for dimension in sizes.split("x")[:-1]:
            size *= int(dimension)
        found.append((size, kind))
    return found


def _bits(kind: str) -> int:
    """Return the bits of an element: "f32", "!tt.ptr<bf16>". A bool is stored in a byte."""
    return max(int(re.search(r"[a-z]+(\d+)>?$", kind)[1]), 8)
