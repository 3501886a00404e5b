"""Nothing in megarl sends a pickle to another process or reads one: pickles run code when they are read.

    pytest tests/test_no_pickle.py

Processes exchange messages of declared types (megarl/messages.py). What torch, Megatron-Core and vLLM pickle inside
themselves is listed in docs/security.md."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
"""Whoever imports one of these writes or reads pickles, or what is like them."""
PICKLING = {
    "all_gather_object": "all_gather_messages",
    "gather_object": "all_gather_messages",
    "broadcast_object_list": "all_gather_messages",
    "scatter_object_list": "all_gather_messages",
    "send_object_list": "a message as a tensor",
    "recv_object_list": "a message as a tensor",
}
"""Function of torch.distributed -> what to take instead."""
PROCESSES = {"Process", "Pool", "Queue", "SimpleQueue", "JoinableQueue", "Manager", "Pipe", "Value", "Array"}
"""What of multiprocessing pickles its arguments or what is put into it."""
CONNECTION = {"send": "send_bytes", "recv": "recv_bytes"}
"""Method of a multiprocessing connection -> what to call instead."""
ALLOWED = {
    "megarl/checkpoint/torch_dist.py": "imports pickle",
    "megarl/megatron/fixes.py": "uses all_gather_object",
}
"""File -> the one thing that it may do: read Megatron's `.metadata` by an unpickler that refuses all but a few
classes; give Megatron's own call the group of the mesh instead of the world."""

GENERATORS = ("steps.send", "self._steps.send")
"""Calls of `send` that resume a generator, which is no connection."""


def violations(source: str) -> Iterator[str]:
    """Say what in a file writes or reads pickles."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from _of_modules(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _of_modules([node.module or ""])
            yield from _of_names(node.module or "", [alias.name for alias in node.names])
        elif isinstance(node, ast.Attribute):
            yield from _of_names(ast.unparse(node.value), [node.attr])
        elif isinstance(node, ast.Call):
            yield from _of_call(node)


def _of_modules(names: Iterator[str] | list[str]) -> Iterator[str]:
    for name in names:
        if name.split(".")[0] in MODULES:
            yield f"imports {name}"
        if name == "concurrent.futures.process":
            yield f"imports {name}: it pickles functions and results"


def _of_names(where: str, names: list[str]) -> Iterator[str]:
    for name in names:
        if name in PICKLING:
            yield f"uses {name}: take {PICKLING[name]}"
        if name in PROCESSES and where.split(".")[-1] in ("multiprocessing", "mp", "context", "queues"):
            yield f"uses {where}.{name}: start a program with plain arguments"
        if name == "ProcessPoolExecutor":
            yield f"uses {name}: it pickles functions and results"


def _of_call(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name in ("__import__", "importlib.import_module", "import_module") and call.args:
        if isinstance(call.args[0], ast.Constant) and str(call.args[0].value).split(".")[0] in MODULES:
            yield f"imports {call.args[0].value}"
    if name == "torch.load" and keywords.get("weights_only") != "True":
        yield "calls torch.load without weights_only=True"
    if name == "torch.save":
        yield "calls torch.save: write safetensors"
    if keywords.get("allow_pickle") == "True":
        yield f"calls {name} with allow_pickle=True"
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name in GENERATORS:
        return
    if method in CONNECTION and not name.startswith(("dist.", "torch.distributed.")):
        yield f"calls {name}: take {CONNECTION[method]}, or another name if it is no connection"


@functools.cache
def found() -> dict[str, list[str]]:
    """Return the violations of every file that has some."""
    files = [*(ROOT / "megarl").rglob("*.py"), *(ROOT / "triton_kernels").glob("*.py")]
    all_found = {str(path.relative_to(ROOT)): [*violations(path.read_text())] for path in files}
    return {path: problems for path, problems in all_found.items() if problems}


def test_nothing_pickles():
    problems = {
        path: [problem for problem in of_file if not problem.startswith(ALLOWED.get(path, "\0"))]
        for path, of_file in found().items()
    }
    assert {path: of_file for path, of_file in problems.items() if of_file} == {}


def test_every_exception_is_needed():
    """A file that no longer pickles is taken from the lists, so that it does not begin again."""
    assert ALLOWED.keys() - found().keys() == set()


def test_what_libraries_pickle_is_listed():
    page = (ROOT / "docs" / "security.md").read_text()
    for path in ALLOWED:
        assert f"`{path}`" in page


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import dumps",
        "def late():\n    import marshal",
        "import dill",
        "from cloudpickle import loads",
        "import importlib\nimportlib.import_module('pickle')",
        "__import__('pickle')",
        "dist.all_gather_object(out, value)",
        "gather = torch.distributed.all_gather_object",
        "from torch.distributed import broadcast_object_list",
        "dist.broadcast_object_list(values, src=0)",
        "dist.gather_object(value)",
        "dist.scatter_object_list(out, values)",
        "conn.send(order)",
        "self._pipe.send((1, 2))",
        "order = conn.recv()",
        "multiprocessing.Process(target=run, args=(config,)).start()",
        "from multiprocessing import Queue",
        "queue = mp.SimpleQueue()",
        "here, there = multiprocessing.Pipe()",
        "from concurrent.futures import ProcessPoolExecutor",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.save(state, path)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_each_way_to_pickle_is_seen(planted):
    assert len([*violations(planted)]) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""No pickle here: not all_gather_object, not torch.load(path)."""',
        "connection.send_bytes(encode(order))",
        "dist.send(tensor, dst=1)\ndist.recv(tensor, src=0)",
        "torch.load(file, weights_only=True)",
        "import multiprocessing.connection\nmultiprocessing.connection.wait(sentinels)",
        "from multiprocessing.connection import Connection",
        "queue.SimpleQueue()",
        "from concurrent.futures import ThreadPoolExecutor",
    ],
)
def test_what_does_not_pickle_passes(source):
    assert [*violations(source)] == []
