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
    "megarl.episodes.agent_pool",
    "megarl.episodes.env_pool",
    "megarl.episodes.probe",
    "megarl.inspect.chat",
    "megarl.tools",
    "megarl.rewards.background",
    "megarl.rewards.pool",
    "megarl.rewards.sandbox",
    "megarl.rewards.code",
    "megarl.runtime.local_ranks",
    "megarl.trainer.launch",
    "megarl.doctor",
    "torch.multiprocessing",
)
"""Modules that start processes for whoever imports from them."""
SERVERS = ("megarl.runtime.node_watch", "megarl.runtime.relay")
"""Modules whose threads wait for connections."""
LAUNCH = TESTS / "launch.py"
"""Starts processes too. Its own deadline is not the tests'."""


@functools.cache
def kind_of(path: Path, test: str) -> str | None:
    """Kind of a test function, without its parameters; None if it starts nothing and waits for nothing."""
    names = set(_reachable(path, test))
    return next((kind for kind in KINDS if names & OF_KIND[kind]), None)


def _reachable(path: Path, name: str) -> Iterator[str]:
    """Every name and attribute that `name` of this file uses, here and in other files of tests/."""
    found, stack = set(), [(path, name)]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            used, others = _uses(*node)
            yield from used
            stack += others


@functools.cache
def _uses(path: Path, name: str) -> tuple[frozenset[str], list[tuple[Path, str]]]:
    """(names and attributes that `name` of this file uses, files of tests/ and the names there to go on with).

    Cached, because thousands of tests reach the same helpers."""
    if path == LAUNCH:
        return frozenset({"subprocess"}), []
    definitions, imports = _module(path)
    if name in definitions:
        found = ((_file_of(path, other), other) for other in definitions[name])
        return definitions[name], [(file, other) for file, other in found if file is not None]
    if name not in imports:
        return frozenset(), []
    module, _, original = imports[name].rpartition(".")
    used = set(imports[name].split("."))
    if f"{module}.".startswith(tuple(f"{starter}." for starter in STARTERS)):
        used.add("subprocess")
    if f"{module}.".startswith(tuple(f"{server}." for server in SERVERS)):
        used.add("threading")
    others = []
    for source, wanted in ((module, original), (imports[name], "*")):
        file = TESTS.parent / f"{source.replace('.', '/')}.py"
        if source.startswith("tests.") and file.is_file():
            others += [(file, other) for other in (_module(file)[0] if wanted == "*" else [wanted])]
    return frozenset(used), others


def _file_of(path: Path, name: str) -> Path | None:
    """Return the file that defines or imports a name for `path`: itself, or a conftest.py above it."""
    for file in (path, *_conftests(path.parent)):
        definitions, imports = _module(file)
        if name in definitions or name in imports:
            return file
    return None


@functools.cache
def _conftests(folder: Path) -> tuple[Path, ...]:
    folders = [above for above in (folder, *folder.parents) if above.is_relative_to(TESTS)]
    return tuple(file for above in folders if (file := above / "conftest.py").is_file())


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
