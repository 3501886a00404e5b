"""Every replacement in Megatron is for the line that it names, made once, in one file, and for one version.

pytest tests/megatron/test_fixes.py"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megarl.config import installed
from megarl.megatron import fixes

CORE = Path(importlib.util.find_spec("megatron").submodule_search_locations[0]) / "core"
PACKAGE = Path(fixes.__file__).parent


@pytest.mark.parametrize("fix", fixes.FIXES, ids=lambda fix: fix.name)
def test_the_line_is_what_the_fix_says(fix):
    assert fix.says in (CORE / fix.file).read_text().splitlines()[fix.line - 1]
    assert fix.apply.__doc__


def test_gathers_of_fsdp_are_started_one_by_one(monkeypatch):
    """And what stands for them waits for them all. That the heap stays whole only a sanitizer would show in
    every run."""
    fixes.fix_megatron()
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import _coalescing_manager

    waited = []
    monkeypatch.setattr(
        dist, "all_gather_into_tensor", lambda name: SimpleNamespace(wait=lambda: waited.append(name))
    )
    with _coalescing_manager(dist.group.WORLD, async_ops=True) as gathers:
        assert dist.all_gather_into_tensor("first").wait() is None and waited == ["first"]
        dist.all_gather_into_tensor("second")
    dist.all_gather_into_tensor("not of these")
    gathers.wait()
    assert waited == ["first", "first", "second"]


def test_another_version_is_refused_before_anything_is_replaced(monkeypatch):
    monkeypatch.setattr(installed.importlib.metadata, "version", lambda name: "0.15.3")
    monkeypatch.setattr(fixes, "FIXES", [])
    command = "pip install --no-deps --ignore-requires-python megatron-core==0.19.2"
    with pytest.raises(RuntimeError, match=rf"^megatron-core \(0.15.3\): .* Run {command}.$"):
        fixes.fix_megatron.__wrapped__()


def test_all_of_megatron_core_imports_on_this_python():
    """Its metadata ask for 3.12; the set-up installs it on 3.11 too, where every module must run."""
    code = """
import importlib, pathlib
from megarl.megatron.cpu_shim import cpu_megatron
with cpu_megatron():
    import megatron.core
    core = pathlib.Path(megatron.core.__file__).parent
    for path in sorted(core.rglob("*.py")):
        compile(path.read_text(), path, "exec")
        importlib.import_module(".".join(path.relative_to(core.parents[1]).with_suffix("").parts))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


def test_nothing_else_writes_into_megatron():
    """An attribute of a module of Megatron is set in fixes.py, and by the shim for the device; nowhere else
    in the package."""
    found = []
    for path in PACKAGE.glob("*.py"):
        tree = ast.parse(path.read_text())
        modules = {
            alias.asname
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name.startswith("megatron") and alias.asname
        }
        modules |= {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron")
            for alias in node.names
        }
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = [
                t
                for target in targets
                for t in ast.walk(target)
                if isinstance(t, ast.Attribute) and isinstance(t.ctx, ast.Store)
            ]
            found += [path.name for t in names if isinstance(t.value, ast.Name) and t.value.id in modules]
    assert set(found) == {"fixes.py", "cpu_shim.py"}
