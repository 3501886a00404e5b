"""Draw docstrings' first lines at random, for a reader who does not know the code to say what they mean.

    python tools/draw_docstrings.py [--commit COMMIT] [--count 40]

The hash of the commit is the seed, so nobody chooses the lines. Modules, classes and functions of megarl/ and
triton_kernels/ take part."""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("megarl", "triton_kernels")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", default="HEAD", help="tree to draw from")
    parser.add_argument("--count", type=int, default=40, help="number of docstrings")
    arguments = parser.parse_args()
    commit = git("rev-parse", arguments.commit).strip()
    names = git("ls-tree", "-r", "--name-only", commit, *FOLDERS).split()
    lines = [
        f"{path}: {name}: {first}"
        for path in sorted(names)
        if path.endswith(".py")
        for name, first in first_lines(git("show", f"{commit}:{path}"))
    ]
    for line in sorted(random.Random(commit).sample(lines, min(arguments.count, len(lines)))):
        print(line)


def first_lines(source: str) -> Iterator[tuple[str, str]]:
    """Yield (name, first paragraph on one line) of every docstring of a module."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "name", "module"), " ".join(text.split("\n\n")[0].split())


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
