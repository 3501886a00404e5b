"""Which tests start processes, send signals or depend on time: `pytest -m processes`. `make test-stress` runs
these again and again.

A test is one if its function, a fixture that it asks for, or whatever they use in tests/ does. So nobody has
to remember a mark: conftest.py sets it from what is found here, with the kind as its argument.

    signals     sends one, or handles one
    deadlines   threads, clocks, sleeping
    children    starts processes"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
KINDS = ("signals", "deadlines", "children")
"""The most suspicious first. A test has the first that fits."""
OF_KIND = {
    "signals": {"signal", "kill", "killpg", "send_signal", "raise_signal", "terminate"},
    "deadlines": {"threading", "sleep", "monotonic", "ThreadPoolExecutor"},
    "children": {"subprocess", "multiprocessing", "mp", "fork", "posix_spawn"},
}
"""Names of modules and attributes."""
STARTERS = (
    "megarl.rewards.pool",
    "megarl.rewards.sandbox",
    "megarl.rewards.code",
    "megarl.runtime.local_ranks",
    "megarl.trainer.launch",
    "megarl.doctor",
    "torch.multiprocessing",
)
"""Modules that start processes for whoever imports from them."""
LAUNCH = TESTS / "launch.py"
"""Starts processes too. Its own deadline is not the tests'."""


@functools.cache
def kind_of(path: Path, test: str) -> str | None:
    """Kind of a test function, without its parameters; None if it starts nothing and waits for nothing."""
    names = set(_reachable(path, test, frozenset()))
    return next((kind for kind in KINDS if names & OF_KIND[kind]), None)


def _reachable(path: Path, name: str, seen: frozenset[tuple[Path, str]]) -> Iterator[str]:
    """Every name and attribute that `name` of this file uses, here and in other files of tests/."""
    found, stack = set(seen), [(path, name)]
    while stack:
        path, name = stack.pop()
        if (path, name) in found:
            continue
        found.add((path, name))
        if path == LAUNCH:
            yield "subprocess"
            continue
        definitions, imports = _module(path)
        if name in definitions:
            used = definitions[name]
            yield from used
            for other in used:
                files = [
                    file
                    for file in (path, *_conftests(path))
                    if other in {**_module(file)[0], **_module(file)[1]}
                ]
                stack += [(file, other) for file in files[:1]]
        elif name in imports:
            module, _, original = imports[name].rpartition(".")
            yield from imports[name].split(".")
            if f"{module}.".startswith(tuple(f"{starter}." for starter in STARTERS)):
                yield "subprocess"
            for source, wanted in ((module, original), (imports[name], "*")):
                file = TESTS.parent / f"{source.replace('.', '/')}.py"
                if source.startswith("tests.") and file.is_file():
                    stack += [(file, other) for other in (_module(file)[0] if wanted == "*" else [wanted])]


def _conftests(path: Path) -> list[Path]:
    folders = [folder for folder in path.parents if folder.is_relative_to(TESTS)]
    return [file for folder in folders if (file := folder / "conftest.py").is_file()]


@functools.cache
def _module(path: Path) -> tuple[dict[str, frozenset[str]], dict[str, str]]:
    """(top-level name -> the names and attributes that its definition uses, imported name -> its full
    name)."""
    definitions: dict[str, frozenset[str]] = {}
    tree = ast.parse(path.read_text())
    for node in tree.body:
        for name in _defined(node):
            definitions[name] = definitions.get(name, frozenset()) | frozenset(_used(node))
    imports = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports |= {
                alias.asname or alias.name.partition(".")[0]: alias.name
                if alias.asname
                else alias.name.partition(".")[0]
                for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            imports |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return definitions, imports


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _used(node: ast.stmt) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.arg):
            yield part.arg
        elif (
            isinstance(part, ast.Call)
            and isinstance(part.func, ast.Attribute)
            and part.func.attr == "usefixtures"
        ):
            yield from (arg.value for arg in part.args if isinstance(arg, ast.Constant))
