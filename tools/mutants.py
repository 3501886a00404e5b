"""Change the code in small ways, one at a time, and see whether the tests notice.

    python tools/mutants.py --number 40              40 mutants, drawn by the hash of HEAD
    python tools/mutants.py --number 40 --list       print them and run nothing
    python tools/mutants.py --files megarl/trainer   only mutants of these files or folders

A mutant is one changed comparison, sum, condition, number or truth value in a function of megarl/ or
triton_kernels/. Each is tried with the tests of its file's room, up to the first failure; then those that survived
with all tests that are not nightly. A mutant that survives these too is printed as a diff, for a reader to say
whether it means the same (a faster path, a message) or a test is missing.

The files of this tree are changed while a mutant's tests run, and restored: use a clone in which nobody works.
build/mutants/state.json keeps the results, and a second call continues."""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("megarl", "triton_kernels")
COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*"}
LIMIT_S = 1500.0
"""Seconds after which the tests of a mutant count as hanging, which kills it."""


@dataclass(frozen=True)
class Mutant:
    """A piece of source text, and what replaces it."""

    file: str
    """relative to the root of the repository"""
    line: int
    start: int
    """first character of the replaced text in the file"""
    end: int
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.start}: {self.new}"

    def applied_to(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seed", help="any text (default: the hash of HEAD)")
    parser.add_argument("--files", nargs="+", default=FOLDERS, help="files or folders to draw from")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants", help="of the results")
    options = parser.parse_args()
    drawn = draw(options.files, options.number, options.seed or git("rev-parse", "HEAD").strip())
    if options.list:
        print("\n".join(map(difference, drawn)))
        return 0
    if git("status", "--porcelain", *FOLDERS).strip():
        sys.exit(f"{ROOT} has changes that are not committed. Run the mutants in a clean clone.")
    if failed := first_failure([ROOT / "tests" / "test_batch.py"], 0):
        sys.exit(f"Tests fail without any mutant: {failed}")
    options.folder.mkdir(parents=True, exist_ok=True)
    state = options.folder / "state.json"
    results = json.loads(state.read_text()) if state.exists() else {}
    for stage in ("room", "all"):
        for mutant in drawn:
            tried = results.setdefault(str(mutant), {})
            if stage not in tried and not any(tried.values()):
                tried[stage] = killed_by(mutant, stage)
                state.write_text(json.dumps(results, indent=0) + "\n")
                print(f"{mutant}\n    {tried[stage] or f'survives ({stage})'}", flush=True)
    survivors = [mutant for mutant in drawn if not any(results[str(mutant)].values())]
    print(f"{len(drawn) - len(survivors)} of {len(drawn)} killed", *map(difference, survivors), sep="\n")
    return int(bool(survivors))


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def draw(files: list[str], number: int, seed: str) -> list[Mutant]:
    """Draw mutants: each candidate of all files is equally likely, and no line has two."""
    paths = [line for line in git("ls-files", *files).splitlines() if line.endswith(".py")]
    found = [mutant for path in paths for mutant in candidates(path, (ROOT / path).read_text())]
    random.Random(seed).shuffle(found)
    one_a_line = {(mutant.file, mutant.line): mutant for mutant in reversed(found)}
    return [mutant for mutant in found if one_a_line[mutant.file, mutant.line] is mutant][:number]


def candidates(file: str, text: str) -> Iterator[Mutant]:
    """Yield the mutants of a file, in functions only: what runs at import is mostly names and tables."""
    offsets = [0]
    for line in text.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line.encode()))
    if len(text) != offsets[-1]:
        return  # positions of Python's parser are bytes, ours are characters

    def at(line: int, column: int) -> int:
        return offsets[line - 1] + column

    def between(left: ast.expr, right: ast.expr, symbols: str, new: str) -> Iterator[Mutant]:
        """Yield a mutant with another operator between two expressions."""
        start, end = at(left.end_lineno, left.end_col_offset), at(right.lineno, right.col_offset)
        operator = re.search(symbols, text[start:end])
        if operator:
            yield Mutant(file, left.end_lineno, start + operator.start(), start + operator.end(), new)

    for function in functions(ast.parse(text)):
        for node in (node for statement in function.body for node in ast.walk(statement)):
            match node:
                case ast.Compare(left=left, ops=[operator], comparators=[right]):
                    words = r"not\s+in|is\s+not|in|is|[<>=!]=|[<>]"
                    yield from between(left, right, words, COMPARISONS[type(operator)])
                case ast.BinOp(left=left, op=operator, right=right) if (
                    type(operator) in OPERATORS and not is_text(left) and not is_text(right)
                ):
                    yield from between(left, right, r"//|[-+*/%]", OPERATORS[type(operator)])
                case ast.BoolOp(op=operator, values=[left, right, *_]):
                    yield from between(
                        left, right, r"and|or", "or" if isinstance(operator, ast.And) else "and"
                    )
                case ast.Constant(value=bool() | int() as value):
                    start, end = (
                        at(node.lineno, node.col_offset),
                        at(node.end_lineno, node.end_col_offset),
                    )
                    if text[start:end] == repr(value):  # not inside an f-string
                        new = repr(not value) if isinstance(value, bool) else repr(value + 1)
                        yield Mutant(file, node.lineno, start, end, new)
                case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                    start, end = (
                        at(test.lineno, test.col_offset),
                        at(test.end_lineno, test.end_col_offset),
                    )
                    yield Mutant(file, test.lineno, start, end, f"not ({text[start:end]})")


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions and methods of a module, but not those inside another function."""
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                yield inner


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def killed_by(mutant: Mutant, stage: str) -> str:
    """Return the first test of a stage that fails with a mutant, "" if none does."""
    path = ROOT / mutant.file
    original, times = path.read_text(), path.stat()
    path.write_text(mutant.applied_to(original))
    try:
        return first_failure([ROOT / "tests"], 2) if stage == "all" else first_failure(room(mutant.file), 0)
    finally:
        path.write_text(original)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # so that compiled files stay valid


def room(file: str) -> list[Path]:
    """Return the tests that belong to a file: a folder of tests/, or files named after it."""
    first = Path(file).parts[1] if file.startswith("megarl/") else "kernels"
    folder = ROOT / "tests" / first
    return [folder] if folder.is_dir() else sorted((ROOT / "tests").rglob(f"test_{Path(file).stem}.py"))


def first_failure(tests: list[Path], workers: int) -> str:
    """Run tests up to the first failure. Returns its name, "" if all pass."""
    if not tests:
        return ""
    command = [sys.executable, "-P", "-m", "pytest", "--import-mode=importlib", "-q", "-x", "-rfE"]
    command += ["-p", "no:cacheprovider", "-m", "not nightly", *map(str, tests)]
    command += ["-n", str(workers), "--dist", "loadfile"] if workers else []
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        return f"no end within {LIMIT_S:.0f} s"
    if process.returncode in (0, 5):  # 5: no tests
        return ""
    named = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.MULTILINE)
    return named[1] if named else f"pytest ended with {process.returncode}: {output.strip()[-200:]}"


def difference(mutant: Mutant) -> str:
    """Return the lines that a mutant changes, as a diff."""
    text = (ROOT / mutant.file).read_text()
    lines = difflib.unified_diff(
        text.splitlines(), mutant.applied_to(text).splitlines(), mutant.file, mutant.file, lineterm="", n=0
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
