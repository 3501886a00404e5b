"""The tests of tests/kernels by the Triton kernels on a GPU; skipped without one.

A test file here takes over the functions of its namesake in tests/kernels. They make their tensors on the
CPU: each door of megarl.kernels that such a file imported is wrapped so that its tensors go to the GPU and
its results come back."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.kernels.backend import _interprets

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what the emulated device (tests/hostcuda) cannot show: Triton's kernels, and time."""
    if "HOSTCUDA" not in os.environ:
        return
    for item in items:
        if item.path.parent == HERE and (
            item.get_closest_marker("real_gpu") or "kernels" in item.fixturenames
        ):
            item.add_marker(pytest.mark.skip(reason="needs a GPU that is not emulated"))


@pytest.fixture
def kernels(request, monkeypatch) -> Iterator[str]:
    """ "triton", behind every door that the test's file imported, also as the default of a function's argument.

    What a test computes on the CPU, such as a reference, stays there: MEGARL_KERNELS is not set."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if _interprets():
        pytest.fail(
            "Triton was imported to interpret, so nothing here would run on the GPU: unset "
            "TRITON_INTERPRET and MEGARL_KERNELS"
        )
    monkeypatch.delenv("MEGARL_KERNELS", raising=False)
    source, calls = sys.modules[request.function.__module__], []
    doors = {name: on_gpu(door, calls) for name, door in vars(source).items() if is_door(name, door)}
    for function in vars(source).values():
        defaults = getattr(function, "__defaults__", None) or ()
        if getattr(function, "__module__", None) == source.__name__ and defaults:
            replaced = tuple(doors.get(getattr(value, "__name__", ""), value) for value in defaults)
            monkeypatch.setattr(function, "__defaults__", replaced)
    for name, door in doors.items():
        monkeypatch.setattr(source, name, door)
    yield "triton"
    assert calls, "the test called none of its file's doors, so nothing of it ran on the GPU"


def is_door(name: str, value: Any) -> bool:
    return (
        callable(value)
        and not isinstance(value, type)
        and (getattr(value, "__module__", None) or "").startswith("megarl.kernels")
        and not name.endswith("_ref")
    )


def on_gpu(function: Callable, calls: list[str]) -> Callable:
    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(function.__name__)
        return move(function(*move(arguments, "cuda"), **move(options, "cuda")), "cpu")

    return call


def move(value: Any, device: str) -> Any:
    """Every tensor in nested tuples and dictionaries to `device`, differentiably."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: move(part, device) for name, part in value.items()}
    if isinstance(value, tuple):
        parts = [move(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
