"""Measure the amount of code: tokens of Python, functions and files that are too long.

    python tools/code_size.py                       this tree
    python tools/code_size.py --against COMMIT      this tree and the tree of a commit

The tokens are those of Python's tokenizer. Docstrings, comments, line ends and indentation are not counted.
The files are those that are installed (megarl/ and triton_kernels/); moved files count like any other."""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("megarl", "triton_kernels")
NOT_COUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
LONGEST_FUNCTION, LONGEST_FILE = 80, 450


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="COMMIT", help="compare with the tree of this commit")
    commit = parser.parse_args().against
    here = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files_here()}
    total = report("this tree", here)
    if commit is not None:
        before = report(commit, files_of(commit))
        print(f"tokens: {100 * (total / before - 1):+.1f} % against {commit}")
    return 0


def files_here() -> list[Path]:
    """Return the Python files of this tree."""
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def files_of(commit: str) -> dict[str, str]:
    """Return path -> source text of the Python files of a commit."""
    names = git("ls-tree", "-r", "--name-only", commit, *FOLDERS).split()
    return {name: git("show", f"{commit}:{name}") for name in names if name.endswith(".py")}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def report(name: str, files: dict[str, str]) -> int:
    """Print the size of these files. Returns the number of tokens."""
    rooms: dict[str, int] = {}
    for path, source in files.items():
        room = "/".join(path.split("/")[:2])
        rooms[room] = rooms.get(room, 0) + num_tokens(source)
    total = sum(rooms.values())
    print(f"{name}: {total} tokens in {len(files)} files")
    print(
        "  " + ", ".join(f"{room} {size}" for room, size in sorted(rooms.items(), key=lambda r: -r[1])[:12])
    )
    for path, source in files.items():
        if (lines := source.count("\n")) > LONGEST_FILE:
            print(f"  {path}: {lines} lines, more than {LONGEST_FILE}")
        for function, lines in long_functions(source):
            if not path.startswith("triton_kernels/"):
                print(f"  {path}: {function} has {lines} lines, more than {LONGEST_FUNCTION}")
    return total


def num_tokens(source: str) -> int:
    """Count the tokens of a file, without docstrings, comments and layout."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    counted = sum(token.type not in NOT_COUNTED for token in tokens)
    return counted - sum(
        isinstance(node, ast.Expr) and is_text(node.value) for node in ast.walk(ast.parse(source))
    )


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def long_functions(source: str) -> list[tuple[str, int]]:
    """Return (name, lines) of the functions that are too long."""
    return [
        (node.name, lines)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (lines := node.end_lineno - node.lineno + 1) > LONGEST_FUNCTION
    ]


if __name__ == "__main__":
    sys.exit(main())
